"""The polynomial schedule: polynomial decay of the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from weft.optim.schedule import Schedule


@dataclass(eq=False, kw_only=True)
class Polynomial(Schedule):
    """Polynomial decay of the learning rate after the warm-up.

    The learning rate is `optimizer.lr * (final + (1 - final) * (1 - progress) ** power)`. `progress` rises from
    0 at the end of the warm-up to 1 at the end of the run.

    Args:
        warmup_steps: number of steps over which the learning rate rises linearly to `optimizer.lr`; default: 0.
        warmup_fraction: `warmup_steps` as a fraction of the run's steps. Set `warmup_steps` or `warmup_fraction`, not
            both.
        final: learning rate at the end of the run, as a fraction of `optimizer.lr`.
        power: exponent of the decay; 1 is linear.
    """

    final: Annotated[float, Ge(0), Le(1)] = 0.0
    power: Annotated[float, Gt(0)] = 2.0

    def after_warmup(self, step: int, steps: int) -> float:
        return self.final + (1 - self.final) * (1 - step / steps) ** self.power

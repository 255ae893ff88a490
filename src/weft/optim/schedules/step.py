"""The step schedule: step-wise decay of the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from weft.optim.schedule import Schedule


@dataclass(eq=False, kw_only=True)
class Step(Schedule):
    """Multiplies the learning rate by `factor` every `every` steps after the warm-up.

    Args:
        warmup_steps: number of steps over which the learning rate rises linearly to `optimizer.lr`; default: 0.
        warmup_fraction: `warmup_steps` as a fraction of the run's steps. Set `warmup_steps` or `warmup_fraction`, not
            both.
        every: number of steps between two reductions of the learning rate.
        factor: multiplier of the learning rate at each reduction.
    """

    every: Annotated[int, Ge(1)]
    factor: Annotated[float, Gt(0), Le(1)] = 0.1

    def after_warmup(self, step: int, steps: int) -> float:
        return self.factor ** (step // self.every)

"""The cosine schedule: cosine decay (Loshchilov & Hutter, "SGDR", 2017), without restarts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from weft.optim.schedule import Schedule


@dataclass(eq=False, kw_only=True)
class Cosine(Schedule):
    """After the warm-up, the learning rate decays along half a cosine to the fraction `final` of `optimizer.lr`.

    Args:
        warmup_steps: number of steps over which the learning rate rises linearly to `optimizer.lr`; default: 0.
        warmup_fraction: `warmup_steps` as a fraction of the run's steps. Set `warmup_steps` or `warmup_fraction`, not
            both.
        final: learning rate at the end of the run, as a fraction of `optimizer.lr`.
    """

    final: Annotated[float, Ge(0), Le(1)] = 0.1

    def after_warmup(self, step: int, steps: int) -> float:
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * step / steps))

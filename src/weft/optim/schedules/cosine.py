"""Cosine decay (Loshchilov & Hutter, "SGDR", 2017), without restarts."""

from __future__ import annotations

import math
from typing import Annotated

from annotated_types import Ge, Le

from weft.optim.schedule import Schedule


class Cosine(Schedule):
    """Half a cosine down to `final` (a fraction of lr)."""

    def __init__(
        self,
        total_steps: int,
        *,
        warmup_steps: Annotated[int, Ge(0)] | None = None,
        warmup_fraction: Annotated[float, Ge(0), Le(1)] | None = None,
        final: Annotated[float, Ge(0), Le(1)] = 0.1,
    ):
        super().__init__(total_steps, warmup_steps, warmup_fraction)
        self.final = final

    def after_warmup(self, step: int, steps: int) -> float:
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * step / steps))

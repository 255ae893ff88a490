"""Exponential decay."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le

from weft.optim.schedule import Schedule


class Exponential(Schedule):
    """`final ** progress`: one constant factor per step, `final` (a fraction of lr) at the end."""

    def __init__(
        self,
        total_steps: int,
        *,
        warmup_steps: Annotated[int, Ge(0)] | None = None,
        warmup_fraction: Annotated[float, Ge(0), Le(1)] | None = None,
        final: Annotated[float, Gt(0), Le(1)] = 0.01,
    ):
        super().__init__(total_steps, warmup_steps, warmup_fraction)
        self.final = final

    def after_warmup(self, step: int, steps: int) -> float:
        return self.final ** (step / steps)

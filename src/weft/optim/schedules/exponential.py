"""Exponential decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Le

from weft.optim.schedule import Schedule


@dataclass(eq=False, kw_only=True)
class Exponential(Schedule):
    """`final ** progress`: one constant factor per step, `final` (a fraction of lr) at the end."""

    final: Annotated[float, Gt(0), Le(1)] = 0.01

    def after_warmup(self, step: int, steps: int) -> float:
        return self.final ** (step / steps)

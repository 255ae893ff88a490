"""Polynomial decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from weft.optim.schedule import Schedule


@dataclass(eq=False, kw_only=True)
class Polynomial(Schedule):
    """`(1 - progress) ** power`, down to `final` (a fraction of lr)."""

    final: Annotated[float, Ge(0), Le(1)] = 0.0
    power: Annotated[float, Gt(0)] = 2.0

    def after_warmup(self, step: int, steps: int) -> float:
        return self.final + (1 - self.final) * (1 - step / steps) ** self.power

"""Step-wise decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from weft.optim.schedule import Schedule


@dataclass(eq=False, kw_only=True)
class Step(Schedule):
    """Multiplies the learning rate by `factor` every `every` steps after the warm-up."""

    every: Annotated[int, Ge(1)]
    factor: Annotated[float, Gt(0), Le(1)] = 0.1

    def after_warmup(self, step: int, steps: int) -> float:
        return self.factor ** (step // self.every)

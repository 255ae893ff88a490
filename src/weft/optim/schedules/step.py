"""Step-wise decay."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le

from weft.optim.schedule import Schedule


class Step(Schedule):
    """Multiplies the learning rate by `factor` every `every` steps after the warm-up."""

    def __init__(
        self,
        total_steps: int,
        *,
        warmup_steps: Annotated[int, Ge(0)] | None = None,
        warmup_fraction: Annotated[float, Ge(0), Le(1)] | None = None,
        every: Annotated[int, Ge(1)],
        factor: Annotated[float, Gt(0), Le(1)] = 0.1,
    ):
        super().__init__(total_steps, warmup_steps, warmup_fraction)
        self.every, self.factor = every, factor

    def after_warmup(self, step: int, steps: int) -> float:
        return self.factor ** (step // self.every)

"""A constant learning rate, after the warm-up."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from weft.optim.schedule import Schedule


class Constant(Schedule):
    """The learning rate stays."""

    def __init__(
        self,
        total_steps: int,
        *,
        warmup_steps: Annotated[int, Ge(0)] | None = None,
        warmup_fraction: Annotated[float, Ge(0), Le(1)] | None = None,
    ):
        super().__init__(total_steps, warmup_steps, warmup_fraction)

    def after_warmup(self, step: int, steps: int) -> float:
        return 1.0

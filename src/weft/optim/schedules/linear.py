"""Linear decay."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from weft.optim.schedule import Schedule


class Linear(Schedule):
    """A straight line down to `final` (a fraction of lr)."""

    def __init__(
        self,
        total_steps: int,
        *,
        warmup_steps: Annotated[int, Ge(0)] | None = None,
        warmup_fraction: Annotated[float, Ge(0), Le(1)] | None = None,
        final: Annotated[float, Ge(0), Le(1)] = 0.0,
    ):
        super().__init__(total_steps, warmup_steps, warmup_fraction)
        self.final = final

    def after_warmup(self, step: int, steps: int) -> float:
        return 1 + (self.final - 1) * step / steps

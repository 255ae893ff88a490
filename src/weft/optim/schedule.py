"""Base class of learning-rate schedules: linear warm-up, then a decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from weft.errors import UserError


@dataclass(eq=False)
class Schedule:
    """A schedule: maps a step to the multiplier of every parameter group's learning rate.

    Args:
        total_steps: number of optimizer steps of the run.
        warmup_steps: number of steps over which the multiplier rises linearly from 1/warmup_steps to 1.
        warmup_fraction: `warmup_steps` as a fraction of `total_steps`. Set `warmup_steps` or `warmup_fraction`, not
            both.
    """

    total_steps: int
    warmup_steps: Annotated[int, Ge(0)] | None = None
    warmup_fraction: Annotated[float, Ge(0), Le(1)] | None = None

    def __post_init__(self):
        if self.warmup_steps is not None and self.warmup_fraction is not None:
            raise UserError("schedule: warmup_steps and warmup_fraction are both set; remove one of them")
        self.warmup_steps = self.warmup_steps or round((self.warmup_fraction or 0.0) * self.total_steps)
        if self.warmup_steps > self.total_steps:
            raise UserError(
                f"schedule: a warm-up of {self.warmup_steps} steps exceeds the run's {self.total_steps} steps; "
                "lower schedule.warmup_steps"
            )

    def __call__(self, step: int) -> float:
        """Returns the multiplier of the learning rates at step `step`, counted from 0."""
        warmup_steps = self.warmup_steps or 0
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return self.after_warmup(step - warmup_steps, max(1, self.total_steps - warmup_steps))

    def after_warmup(self, step: int, steps: int) -> float:
        """Returns the multiplier of the learning rates at a step after the warm-up.

        Args:
            step: number of steps since the end of the warm-up; the multiplier at 0 must be 1.
            steps: number of steps of the run after the warm-up.
        """
        raise NotImplementedError

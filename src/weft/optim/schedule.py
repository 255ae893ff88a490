"""The base of the learning-rate schedules: a warm-up, then a shape."""

from __future__ import annotations

from weft.errors import UserError


class Schedule:
    """A function of the step: the factor on every group's learning rate.

    Args:
        total_steps: optimizer updates of the run.
        warmup_steps: updates of linear rise from lr/warmup_steps to lr.
        warmup_fraction: the same as a share of `total_steps`; only one of the two may be given.
    """

    def __init__(self, total_steps: int, warmup_steps: int | None = None, warmup_fraction: float | None = None):
        if warmup_steps is not None and warmup_fraction is not None:
            raise UserError("schedule: warmup_steps and warmup_fraction are both set; keep one of them")
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps or round((warmup_fraction or 0.0) * total_steps)
        if self.warmup_steps > total_steps:
            raise UserError(
                f"schedule: {self.warmup_steps} warm-up steps in a run of {total_steps}; lower schedule.warmup_steps"
            )

    def __call__(self, step: int) -> float:
        """The factor of the update number `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self.after_warmup(step - self.warmup_steps, max(1, self.total_steps - self.warmup_steps))

    def after_warmup(self, step: int, steps: int) -> float:
        """The factor `step` updates after the warm-up, of `steps`; 1 at 0."""
        raise NotImplementedError

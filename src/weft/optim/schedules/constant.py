"""A constant learning rate, after the warm-up."""

from __future__ import annotations

from weft.optim.schedule import Schedule


class Constant(Schedule):
    """The learning rate stays constant."""

    def after_warmup(self, step: int, steps: int) -> float:
        return 1.0

"""The constant schedule: the learning rate does not change after the warm-up."""

from __future__ import annotations

from weft.optim.schedule import Schedule


class Constant(Schedule):
    """The learning rate does not change after the warm-up.

    Args:
        warmup_steps: number of steps over which the learning rate rises linearly to `optimizer.lr`; default: 0.
        warmup_fraction: `warmup_steps` as a fraction of the run's steps. Set `warmup_steps` or `warmup_fraction`, not
            both.
    """

    def after_warmup(self, step: int, steps: int) -> float:
        return 1.0

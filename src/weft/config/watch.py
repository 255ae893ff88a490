"""The section `watch` of a run: what is observed during training, and what Weft does about it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.config.section import Section

Action = Literal["warn", "skip", "rollback", "stop"]


class SpikeSection(Section):
    """When a loss or gradient norm is a spike, and what follows. A value is a spike if it exceeds the median of the
    last `window` steps by more than `factor` deviations. The deviation is 1.4826 times the median absolute deviation,
    and at least 1% of the median.
    """

    window: int = Field(100, ge=8)
    """Number of steps with which a value is compared. No value is a spike before half as many steps are made."""
    factor: float = Field(10.0, gt=0)
    """Number of deviations above the median beyond which a value is a spike."""
    action: Action = "warn"
    """`warn`: only a warning. `skip`: the update is not made. `rollback`: training returns to a checkpoint, and
    continues with the data after the spike. `stop`: the run ends with a checkpoint of the weights before the spike.
    """


class WatchSection(Section):
    """What Weft observes during training. Each finding is an event in `logs/events.jsonl` (docs/watch.md)."""

    spike: SpikeSection = Field(default=SpikeSection())
    """When a loss or gradient norm is a spike, and what follows."""
    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """What follows a loss or gradient norm that is NaN or infinite; see `watch.spike.action`. An overflow of float16
    always halves the loss scale and skips the update.
    """
    rollback_checkpoints: int = Field(1, ge=1)
    """Number of checkpoints by which a rollback returns; 1 returns to the newest. Training then skips the data between
    that checkpoint and the bad step. At most `checkpoint.keep_last`.
    """
    max_rollbacks: int = Field(3, ge=1)
    """Number of rollbacks of a run, over all sessions, after which the run stops instead."""

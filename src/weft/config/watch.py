"""The section `watch` of a run: what is observed during training, and what Weft does about it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from weft.config.section import Section, TextPattern

Webhook = Annotated[
    str,
    TextPattern(
        pattern=r"^(https?://[^\s/]\S*|\$[A-Za-z_][A-Za-z0-9_]*)$",
        words="an http or https URL, or $NAME of the environment variable that contains the URL",
    ),
]
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


class AlertSection(Section):
    """Where events of the watch are sent. The first rank sends them beside the training, which never waits for it. A
    failure is a warning once, and the run goes on.
    """

    webhook: Webhook | None = None
    """URL to which each event is posted as a JSON object, or `$NAME` of the environment variable that contains the URL.
    Messages and trackers never show the URL; `config.yaml` of the run shows this value.
    """
    command: list[str] | None = Field(None, min_length=1)
    """Program and arguments that are run for each event, without a shell. Standard input is the event as JSON."""
    timeout: float = Field(10.0, gt=0)
    """Seconds after which a request or a command is given up."""


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
    parameter_check_every: int | None = Field(None, ge=1)
    """Compares, every this many steps, the parameters that replicas should have in common, bit by bit: sums of their
    bits, in one small collective. Default: no comparison.
    """
    replay_every: int | None = Field(None, ge=1)
    """Computes, every this many steps, the gradients twice, and compares them bit by bit. It needs
    `training.determinism: exact`. Default: no repetition.
    """
    corruption: Literal["warn", "rollback", "stop"] = "stop"
    """What follows a difference that `parameter_check_every` or `replay_every` finds. `rollback`: training returns to
    the newest checkpoint without the difference, and repeats the steps. `stop`: the run ends without a new checkpoint.
    """
    every: int = Field(50, ge=1)
    """Number of steps between two comparisons of the ranks' times and memory."""
    slow_rank: float | None = Field(1.5, gt=1)
    """Warns of a rank that spends more than this factor of the other ranks' median time outside of waits for them.
    `null`: no warning.
    """
    data_stall: float | None = Field(0.25, gt=0, lt=1)
    """Warns if a rank waits for batches for more than this share of its time. `null`: no warning."""
    memory_growth: bool = True
    """Whether to warn of memory that grows so steadily that it is used up before the end of the run."""
    disk: bool = True
    """Whether to warn, at the start and before each save, if the disk has room for fewer than two checkpoints."""
    heartbeat: float | None = Field(5.0, ge=0.1)
    """Seconds between two versions of `logs/heartbeat.json`, which shows what the run is doing. `null`: no file."""
    alert: AlertSection | None = None
    """Where events are sent. Default: nowhere."""
    prometheus_port: int | None = Field(None, ge=1, le=65535)
    """Port on 127.0.0.1 where the first rank serves the metrics of the last step for Prometheus, at `/metrics`. It
    needs `pip install 'weft-train[serve]'`. Default: no server.
    """

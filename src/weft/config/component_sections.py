"""`objective:`, `optimizer:`, `schedule:`: swappable parts, chosen by `type:` and checked by their signatures."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from weft.config.section import Component


class ObjectiveSection(Component):
    """What is learned. Built in: files of `weft/objectives/`."""

    kind: ClassVar[str] = "objective"

    type: str = "pretrain"


class OptimizerSection(Component):
    """How weights move. Built in: files of `weft/optim/`. `lr`, `betas`, ...: that class's arguments."""

    kind: ClassVar[str] = "optimizer"

    type: str = "adamw"
    no_decay: list[Literal["norm", "bias", "embedding"]] = Field(
        default=["norm", "bias"], description="parameters that weight decay leaves alone"
    )


class ScheduleSection(Component):
    """How the learning rate moves. Built in: files of `weft/optim/schedules/`."""

    kind: ClassVar[str] = "schedule"

    type: str = "cosine"


class CallbackSection(Component):
    """An action at moments of the run. Built in: files of `weft/train/callbacks/`."""

    kind: ClassVar[str] = "callback"


class MetricSection(Component):
    """A number of a step for metrics.jsonl and the trackers: `module:Class` of your own."""

    kind: ClassVar[str] = "metric"


class TrackerSection(Component):
    """Where metrics are sent besides metrics.jsonl. Built in: files of `weft/observe/trackers/`."""

    kind: ClassVar[str] = "tracker"

"""`objective:`, `optimizer:`, `schedule:`: swappable parts, chosen by `type:` and checked by their signatures."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.config.section import Component


class ObjectiveSection(Component):
    """What is learned. Built in: files of `weft/objectives/`."""

    type: str = "pretrain"


class OptimizerSection(Component):
    """How weights move. Built in: files of `weft/optim/`. `lr`, `betas`, ...: that class's arguments."""

    type: str = "adamw"
    no_decay: list[Literal["norm", "bias", "embedding"]] = Field(
        default=["norm", "bias"], description="parameters that weight decay leaves alone"
    )


class ScheduleSection(Component):
    """How the learning rate moves. Built in: files of `weft/optim/schedules/`."""

    type: str = "cosine"

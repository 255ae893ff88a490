"""Defines `Job`, the context of a training session: config, ranks, run directory and console."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.run import RunConfig
from weft.config.training import TrainingSection
from weft.observe.console import Console
from weft.parallel.world import World
from weft.train.auto_settings import apply_choices, choose
from weft.train.run_directory import RunDirectory, claim


@dataclass(frozen=True)
class Job:
    """The context of a training session on one rank. `config` contains the settings of `auto_settings`."""

    config: RunConfig
    world: World
    run: RunDirectory
    console: Console


def prepare(config: RunConfig, world: World, console: Console, *, fresh: bool) -> Job:
    """Locks the run directory, and applies the automatic settings.

    The automatic settings are equal on all ranks.

    Args:
        fresh: whether to move the content of the run directory aside.
    """
    path = config.run_directory
    lock = world.agree(lambda: claim(path, fresh=fresh), only_first=True)
    run = RunDirectory(path, lock if world.rank == 0 else None)
    config = run.with_dtype(config)
    chosen = world.agree(lambda: choose(config.training, world.device).model_dump(), only_first=True)
    config = config.model_copy(update={"training": TrainingSection(**chosen)})
    apply_choices(config.training)
    return Job(config, world, run, console)

"""What all parts of a training session know: the run file, the ranks, the run directory, the console."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.run import RunConfig
from weft.observe.console import Console
from weft.parallel.world import World
from weft.train.run_directory import RunDirectory


@dataclass(frozen=True)
class Job:
    """One session of a run, seen from one rank.

    Attributes:
        config: the run file, with what Weft chooses filled in.
    """

    config: RunConfig
    world: World
    run: RunDirectory
    console: Console

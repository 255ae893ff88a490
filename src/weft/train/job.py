"""Defines `Job`, the context of a training session: config, ranks, run directory and console."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.checkpoint.checkpoint_files import step_of
from weft.checkpoint.load import checkpoints
from weft.config.run import RunConfig
from weft.config.training import TrainingSection
from weft.config.trust import remember_code
from weft.observe.console import Console
from weft.parallel.world import World
from weft.processes import attempt
from weft.train.auto_settings import apply_choices, choose
from weft.train.failure_record import RUN_ID, RankRecord, has_begun, record_last_attempt
from weft.train.rank_watch import RankWatch
from weft.train.run_directory import RunDirectory, claim, warn_of_other_writers


@dataclass(frozen=True)
class Job:
    """The context of a training session on one rank. `config` contains the settings of `auto_settings`.

    Attributes:
        watch: ends this rank if it hangs.
        changes: what changed since the last session, on the first rank (see `RunDirectory.changes`).
    """

    config: RunConfig
    world: World
    run: RunDirectory
    console: Console
    watch: RankWatch
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def __enter__(self) -> Job:
        self.watch.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        """Ends the watch and unlocks the run directory, so that this process may train there again."""
        self.watch.__exit__(*raised)
        self.run.release()

    def compare_with_last_session(self, digests: Mapping[str, str], steps: int | None, *, accepted: bool) -> None:
        """Compares config and data with those of the last session, on the first rank. All ranks call it.

        Args:
            digests: digests of the data.
            steps: length of the run.
            accepted: whether the user accepts changes that alter the training.

        Raises:
            UserError: there are such changes, and they are not accepted.
        """

        def compare() -> None:
            made = checkpoints(self.run.path)
            step = (step_of(made[-1]) or 0) if made else 0
            if step and not (steps is not None and step >= steps):  # else the run is new, or nothing is to be done
                self.changes.update(self.run.changes(self.config, digests))
                self.run.raise_unless_accepted(self.changes, step, accepted, self.console.warning)

        self.world.agree(compare, only_first=True)


def prepare(config: RunConfig, world: World, console: Console, *, fresh: bool) -> Job:
    """Locks the run directory, and applies the automatic settings.

    The automatic settings are equal on all ranks.

    Args:
        fresh: whether to move the content of the run directory aside.
    """
    path = config.run_directory
    remember_code(config.as_dict())
    number = world.agree(attempt, only_first=True)  # a host that joined later counts fewer
    lock = world.agree(lambda: claim(path, fresh=fresh and not has_begun(path, number)), only_first=True)
    if world.rank == 0 and (warning := warn_of_other_writers(path)) is not None:
        console.warning(warning)
    run = RunDirectory(path, lock if world.rank == 0 else None)
    watch = RankWatch(path, world.rank, world.ranks, config.training.hang_timeout, number)
    if RUN_ID in os.environ:
        world.agree(lambda: record_last_attempt(path, os.environ[RUN_ID]), only_first=True)
        watch.record = RankRecord(path, world.rank, number)
    config = run.with_dtype(config)
    chosen = world.agree(lambda: choose(config.training, world.device).model_dump(), only_first=True)
    config = config.model_copy(update={"training": TrainingSection(**chosen)})
    apply_choices(config.training)
    return Job(config, world, run, console, watch)

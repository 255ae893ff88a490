"""Defines `Job`, the context of a training session: config, ranks, run directory and console."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.checkpoint.checkpoint_files import Keep, step_of
from weft.checkpoint.load import checkpoints
from weft.checkpoint.local_record import recorded
from weft.checkpoint.remote import RemoteRun, open_remote
from weft.checkpoint.run_lock import unlock_run
from weft.checkpoint.uploader import Uploader
from weft.config.run import RunConfig
from weft.config.trust import remember_code
from weft.formatting import masked
from weft.observe.console import Console
from weft.observe.manifest import ended_at
from weft.parallel.ranks import all_gather_object
from weft.parallel.world import World
from weft.processes import attempt
from weft.train.auto_settings import agree_on_settings, warn_of_no_graphs
from weft.train.failure_record import RUN_ID, RankRecord, agent, has_begun, record_last_attempt
from weft.train.rank_watch import RankWatch
from weft.train.run_directory import RunDirectory, claim, warn_of_other_writers


@dataclass(frozen=True)
class Job:
    """The context of a training session on one rank. `config` contains the settings of `auto_settings`.

    Attributes:
        watch: ends this rank if it hangs.
        micro_batch: how the size of micro-batches was chosen, for the manifest; None unless it is `auto`.
        reduction: when gradients are reduced (`last` or `every`), for the manifest; None unless Weft chose it.
        changes: what changed since the last session, on the first rank (see `RunDirectory.changes`).
        remote: the run in the store of `checkpoint.remote`, on the first rank; None without this key.
    """

    config: RunConfig
    world: World
    run: RunDirectory
    console: Console
    watch: RankWatch
    micro_batch: dict[str, Any] | None = None
    reduction: str | None = None
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    remote: RemoteRun | None = None

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

        def last_step() -> int:
            local = recorded(self.run.path)
            made = checkpoints(self.run.path) + (local.checkpoints() if local is not None else [])
            return max((step_of(path) or 0 for path in made), default=0)

        step = max(all_gather_object(self.world.agree(last_step)))  # hosts have different local checkpoints

        def compare() -> None:
            if step and not (steps is not None and step >= steps):  # else the run is new, or nothing is to be done
                self.changes.update(self.run.changes(self.config, digests))
                self.run.raise_unless_accepted(self.changes, step, accepted, self.console.warning)

        self.world.agree(compare, only_first=True)

    def has_ended(self, step: int, steps: int) -> bool:
        """Whether there is nothing left to do for a run of `steps` steps that has made `step`. All ranks call it.

        A run that was killed after its last checkpoint still has to write metrics and report, and to delete files.
        """
        return step > steps or self.world.agree(lambda: ended_at(self.run.path) == step, only_first=True)

    def copy_last(self) -> None:
        """Copies the newest checkpoint to the store of `checkpoint.remote` if it has no copy. All ranks call it.

        Raises:
            UserError: the checkpoint could not be copied.
        """

        def copy() -> None:
            found, settings, remote = checkpoints(self.run.path), self.config.checkpoint, self.remote
            if remote is None or not found or step_of(found[-1]) in remote.steps():
                return
            uploader = Uploader(remote, self.run.path, Keep.configured(settings))
            uploader.start(found[-1])
            uploader.finish()
            self.console.line(f"copied {found[-1].name} to {masked(remote.url)}")

        self.world.agree(copy, only_first=True)


def prepare(config: RunConfig, world: World, console: Console, *, fresh: bool, saves: bool = True) -> Job:
    """Locks the run directory, and applies the automatic settings.

    The automatic settings are equal on all ranks.

    Args:
        fresh: whether to move the content of the run directory aside.
        saves: whether the session saves checkpoints. A profile or a repetition does not touch the object store.
    """
    path = config.run_directory
    remember_code(config.as_dict())
    number = world.agree(attempt, only_first=True)  # a host that joined later counts fewer
    agents = set(all_gather_object(agent())) if RUN_ID in os.environ else set()
    over = world.agree(lambda: fresh and not has_begun(path, number, agents), only_first=True)
    lock = world.agree(lambda: claim(path, fresh=over), only_first=True)
    remote: RemoteRun | None = None
    if saves and (url := config.checkpoint.remote) is not None:

        def find_remote() -> str | None:
            nonlocal remote
            remote, message = open_remote(path, f"{url.rstrip('/')}/{path.name}", fresh=over)
            return message

        try:
            message = world.agree(find_remote, only_first=True)
        except BaseException:
            if world.rank == 0:
                unlock_run(lock)  # so that this process may try again
            raise
        if message is not None:
            console.line(message)
    if world.rank == 0 and (warning := warn_of_other_writers(path)) is not None:
        console.warning(warning)
    run = RunDirectory(path, lock if world.rank == 0 else None)
    watch = RankWatch(path, world.rank, world.ranks, config.training.hang_timeout, number)
    if agents:
        world.agree(lambda: record_last_attempt(path, agents), only_first=True)
        watch.record = RankRecord(path, world.rank, number)
    config = run.with_dtype(config)
    config = config.model_copy(update={"training": agree_on_settings(config.training, world)})
    if (warning := warn_of_no_graphs(config.training, world.device)) is not None:
        console.warning(warning)
    return Job(config, world, run, console, watch, remote=remote)

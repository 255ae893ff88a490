"""Defines `Saver`, which saves the checkpoints of a run: in the training step or beside it, durable and local ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from weft.checkpoint.background import BackgroundSaver
from weft.checkpoint.best import note_value
from weft.checkpoint.checkpoint_files import (
    FOLDER,
    Keep,
    checkpoint_name,
    link_best,
    prune,
    remove_leftovers,
    step_of,
)
from weft.checkpoint.load import checkpoints
from weft.checkpoint.local import KEPT, Local, find_local, open_local
from weft.checkpoint.local_record import RECORD
from weft.checkpoint.save import Content, Layout, StagedSave, stage
from weft.checkpoint.tensor_file import Entry
from weft.checkpoint.uploader import Uploader
from weft.errors import UserError
from weft.files import report_write_errors
from weft.formatting import masked
from weft.observe.metrics import OF_MACHINE, as_number
from weft.observe.status import LONG, doing
from weft.parallel.ranks import error_on_all_ranks
from weft.train.writers import has_custom_passes, only_updates_write

if TYPE_CHECKING:
    from weft.train.loop import Loop

LOCAL_SECONDS = 120.0  # default of checkpoint.local.seconds
SLOWER = 2.0  # a save before a deadline is expected to take this many times as long as the last one
PATIENCE = 30.0  # seconds in which a checkpoint in progress can be completed after a failure
LEAVING = 1.0  # seconds before a deadline when the copy in an object store is given up, to end in order
log = logging.getLogger("weft.train")


class Saver:
    """Saves checkpoints of a training loop.

    With `checkpoint.mode: async`, at most one checkpoint is in progress. The training waits for it before it saves the
    next one, and at its end. Ranks learn from the votes of the next steps (`World.sum`) that it is complete.

    Attributes:
        durable_seconds: seconds that the last checkpoint in the run directory took; None before it.
        durable_at, local_at: step of the last complete checkpoint in the run directory, and of the last local one, of
            this session; -1 before it.
    """

    def __init__(self, loop: Loop):
        self.loop, self.settings = loop, loop.config.checkpoint
        self.background = background = BackgroundSaver() if self.settings.mode == "async" else None
        if background is not None:
            loop.optimizer.register_step_pre_hook(lambda *_: background.copied())
        self._may_copy_late = not has_custom_passes(loop.config)
        self._layout: Layout | None = None  # of the last checkpoint
        self.durable_seconds: float | None = None
        self.durable_at = self.local_at = -1
        self._local: Local | None = None
        self._local_step, self._local_at, self._local_due = 0, time.monotonic(), False
        self._step = 0  # of the checkpoint in progress
        self._completion = ExitStack()
        self._uploader: Uploader | None = None  # of the first rank

    def begin(self, step: int) -> None:
        """Makes the folder of local checkpoints, if they are configured. Every rank must call it."""
        self._local_step, self._local_at, local = step, time.monotonic(), self.settings.local
        if (remote := self.loop.job.remote) is not None:
            self._uploader = Uploader(remote, self.loop.job.run.path, self._keep)
        world, path = self.loop.world, self.loop.job.run.path
        world.agree(self._copy_again, only_first=True)
        if step == self.loop.length.steps:
            world.agree(self._tidy, only_first=True)
        if step and not world.agree(lambda: step in map(step_of, checkpoints(path)), only_first=True):
            self.loop.saved_at = -1  # only a local checkpoint has this step
        if local is None:
            return
        self._local = open_local(path, local)
        self._local.forget_after(step)

    @property
    def _keep(self) -> Keep:
        return Keep.configured(self.settings)

    @property
    def votes(self) -> list[float]:
        """This rank's votes: the checkpoint in progress is complete; a local checkpoint is due (only rank 0 votes)."""
        ended = self.background is not None and self.background.ended
        local, due = self.settings.local, False
        if local is not None and local.steps is None and self.loop.world.rank == 0:
            due = time.monotonic() - self._local_at >= (local.seconds or LOCAL_SECONDS)
        return [float(ended), float(due)]

    def decide(self, votes: Sequence[float]) -> None:
        """Acts on the summed votes: completes the checkpoint in progress, and decides about a local one after the step.

        Raises:
            UserError: the checkpoint could not be written, on all ranks.
        """
        ended, due = votes
        if ended == self.loop.world.ranks:
            self.finish()
        self._local_due = due > 0

    def after_update(self, step: int) -> None:
        """Saves a checkpoint after an update, if one is due."""
        if self.loop.due(step, self.loop.length.checkpoint_every):
            self.save(step)
        elif self._local is not None and self._is_local_due(step) and not (self.background and self.background.busy):
            self.save(step, self._local)

    def may_save(self, step: int) -> bool:
        """Whether `after_update` may save a local checkpoint after this step."""
        return self._local is not None and self._is_local_due(step)

    def validated(self, step: int, measured: Mapping[str, float]) -> None:
        """Notes the metric by which checkpoints are compared. Every rank must call it after each validation.

        Raises:
            UserError: validations have no such metric, or it cannot be written; on all ranks.
        """
        settings, loop = self.settings, self.loop
        if not settings.keep_best:
            return
        if settings.best_metric not in measured:
            raise error_on_all_ranks(
                f"checkpoint.best_metric: validations have no metric {settings.best_metric!r}; use one of "
                f"{', '.join(measured)}"
            )
        folder, value = loop.job.run.path / FOLDER, float(measured[settings.best_metric])

        def note() -> None:
            folder.mkdir(exist_ok=True)
            with report_write_errors(folder):
                note_value(folder, step, value, settings.best_metric, settings.best_mode)
                link_best(folder)

        loop.world.agree(note, only_first=True)

    def _is_local_due(self, step: int) -> bool:
        steps = self.settings.local.steps if self.settings.local is not None else None
        return self._local_due or (steps is not None and step - self._local_step >= steps)

    def save(self, step: int, local: Local | None = None) -> None:
        """Saves a checkpoint: weights, optimizer state, loss scale, callbacks' state, and the step.

        Args:
            local: where to save a local checkpoint. Default: the run directory.
        """
        self.finish()
        self.loop.monitor.before_save(None if local is None else local.folder)
        self._completion.pop_all()  # of a save that failed
        loop, background = self.loop, self.background
        if self._uploader is not None and (problem := self._uploader.problem()) is not None:
            loop.job.console.warning(f"{problem}; it is tried again with this one")
        self._completion.callback(self._completed, step, time.monotonic(), local)
        self._completion.enter_context(loop.recorder.saving(step))
        hold = None if background is None else background.begin()
        staged = self._stage(step, local, hold)
        if local is None:
            loop.saved_at = step
        self._local_step, self._local_at = step, time.monotonic()
        if background is None:
            staged.write()
            self._completion.close()
        else:
            background.start(staged, late=self._may_copy_late and only_updates_write(loop, step))

    def save_last(self, step: int, left: float | None) -> None:
        """Saves a checkpoint at the end of a session. If it may come too late, saves a local checkpoint first.

        A local checkpoint needs no key `checkpoint.local`.

        Args:
            left: seconds until the processes of the run must end, on any rank; None: no limit.
        """
        took = self.durable_seconds
        late = left is not None and (took is None or SLOWER * took > left)
        if self.local_at != step and self.loop.world.agree(lambda: late, only_first=True):
            try:
                self._save_local(step)
            except UserError as error:  # on all ranks; the durable checkpoint may still be possible
                self.loop.job.console.warning(str(error))
        self.save(step)

    def _save_local(self, step: int) -> None:
        """Saves a local checkpoint now, even if another checkpoint is in progress beside the training."""
        if self._local is None:
            self._local = open_local(self.loop.job.run.path, self.settings.local)
        self._stage(step, self._local).write()
        self.local_at = step

    def _stage(self, step: int, local: Local | None, hold: Callable[[Entry], Entry] | None = None) -> StagedSave:
        """Stages a checkpoint of the current state in the folder of local checkpoints, or in the run directory."""
        loop = self.loop
        values, tensors = loop.callbacks.state_dict()
        compress = loop.compress.state() if loop.compress is not None else {}
        architecture = loop.config.model.model_dump(mode="json", by_alias=True)
        others = {**compress, **tensors, **loop.frozen.tensors()}
        content = Content(step, loop.model, loop.optimizer, self._state(step, values), architecture, others)
        where = (loop.job.run.path, self._keep, None) if local is None else (local.folder, Keep(KEPT), local.hosts)
        folder, keep, hosts = where
        staged = stage(folder, content, keep, hold, hosts, self._layout)
        self._layout = staged.layout
        return staged

    def finish(self) -> None:
        """Waits for the checkpoint in progress, if there is one. Every rank must call it.

        Raises:
            UserError: the checkpoint could not be written, on all ranks.
        """
        if self.background is None or not self.background.busy:
            return
        doing("waiting for the checkpoint in progress", "save", LONG)
        self.background.finish()
        self._completion.close()

    def forget_after(self, step: int) -> None:
        """Deletes local checkpoints, after a rollback to `step`. Every rank must call it.

        A host that was away may return with some from before the rollback, so further ones are in a new folder.
        """
        world, path = self.loop.world, self.loop.job.run.path
        uploader = self._uploader
        world.agree(lambda: uploader.forget_after(step) if uploader is not None else None, only_first=True)
        self._clear_local()
        self.local_at = -1
        if self._local is not None:
            self._local = open_local(path, self.settings.local)
        self._local_step = step

    def end(self) -> None:
        """Waits for the checkpoint in progress, deletes the local checkpoints, and waits for the copy in the store.

        Raises:
            UserError: the last checkpoint could not be written or copied, on all ranks.
        """
        self.finish()
        self._clear_local()
        if self.settings.remote is not None:
            doing("copying the last checkpoint to the object store", "save", LONG)
        self.loop.world.agree(self._finish_copies, only_first=True)

    def _copy_again(self) -> None:
        """Copies the newest checkpoint to the store if the last session, which was killed or stopped, did not."""
        uploader, found = self._uploader, checkpoints(self.loop.job.run.path)
        if uploader is not None and found and step_of(found[-1]) not in uploader.remote.steps():
            self.loop.job.console.line(f"copying {found[-1].name} to {masked(uploader.remote.url)}")
            uploader.start(found[-1])

    def _finish_copies(self) -> None:
        if self._uploader is not None:
            left = self.loop.state.stop.left
            if (warning := self._uploader.finish(None if left is None else max(left - LEAVING, 0.0))) is not None:
                self.loop.job.console.warning(warning)

    def _tidy(self) -> None:
        """Ends the last save of the run, whose session was killed; that of another step is ended by the next save."""
        if (folder := self.loop.job.run.path / FOLDER).is_dir():
            remove_leftovers(folder)
            prune(folder, self._keep)

    def _clear_local(self) -> None:
        """Deletes the local checkpoints, also those of earlier sessions, and their record. Every rank must call it."""
        path = self.loop.job.run.path
        if (local := self._local or find_local(path, self.settings.local)) is not None:
            local.clear()
        self.loop.world.agree(lambda: (path / RECORD).unlink(missing_ok=True), only_first=True)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None and issubclass(kind, Exception):
            self.abandon()

    def abandon(self) -> None:
        """Gives the checkpoint in progress some time, before this process exits after a failure."""
        if self.background is not None:
            try:
                self.background.finish(PATIENCE)
            except Exception as error:  # must not replace the exception that ends the run
                log.warning("the last checkpoint is not complete: %s", error)

    def _completed(self, step: int, began: float, local: Local | None) -> None:
        """Called when a checkpoint is complete: calls the callbacks' `saved` with its step."""
        if local is not None:
            self.local_at = step
            return
        self.durable_at = step
        if self._uploader is not None:
            self._uploader.start(self.loop.job.run.path / FOLDER / checkpoint_name(step))
        if self.settings.keep_best:
            self.loop.world.agree(lambda: link_best(self.loop.job.run.path / FOLDER), only_first=True)
        self.durable_seconds = time.monotonic() - began
        state = self.loop.state
        now, state.step = state.step, step
        self.loop.callbacks.call("saved", state)
        state.step = now

    def _state(self, step: int, callbacks: dict[str, Any]) -> dict[str, Any]:
        """Returns the JSON values of a checkpoint."""
        loop = self.loop
        validates = loop.data.validates and loop.due(step, loop.length.validation_every)
        pending = validates and loop.validated_at != step
        metrics = loop.state.metrics if loop.state.logged or validates else {}  # not yet written, if the step goes on
        # Without times, which would make the checkpoints of equal runs differ.
        kept = {name: as_number(value) for name, value in metrics.items() if name not in OF_MACHINE}
        return {
            "step": step,
            "tokens": loop.tokens,
            "seed": loop.config.run.seed,
            **loop.scale.state(),
            **loop.guard.state(),
            **({"frozen_models": loop.frozen.records} if loop.frozen.records else {}),
            **({"metrics": kept} if kept else {}),
            **({"callbacks": callbacks, "validated": not pending} if loop.callbacks.found else {}),
        }


class NoSaver(Saver):
    """Saves nothing: a profile or a repetition has no checkpoint, even after a signal or a non-finite loss."""

    def validated(self, step: int, measured: Mapping[str, float]) -> None:
        """Notes nothing."""

    def begin(self, step: int) -> None:
        """Makes no folder."""

    def save(self, step: int, local: Local | None = None) -> None:
        """Does nothing."""

    def save_last(self, step: int, left: float | None) -> None:
        """Does nothing."""

    def end(self) -> None:
        """Waits for nothing."""

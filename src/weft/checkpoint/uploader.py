"""Defines `Uploader`, which copies the checkpoints of a run to an object store beside the training."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.best import read_values
from weft.checkpoint.remote import RemoteRun, reason
from weft.errors import UserError
from weft.formatting import masked


class Uploader:
    """Copies complete checkpoints to an object store in a thread, one at a time; newer ones replace those that wait.

    Args:
        remote: the run in the store.
        run: the run directory.
        keep: which checkpoints stay in the store.
    """

    def __init__(self, remote: RemoteRun, run: Path, keep: files.Keep):
        self.remote, self.run, self.keep = remote, run, keep
        self._waiting: Path | None = None
        self._thread: threading.Thread | None = None  # None once it has found that no checkpoint waits
        self._lock = threading.Lock()  # of both
        self._problem: str | None = None
        self._copied = False

    def start(self, checkpoint: Path) -> None:
        """Copies a checkpoint as soon as the one in progress is copied."""
        with self._lock:
            self._waiting = checkpoint
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
                self._thread.start()

    def _next(self) -> Path | None:
        with self._lock:
            checkpoint, self._waiting = self._waiting, None
            if checkpoint is None:
                self._thread = None  # `start` begins another one
            return checkpoint

    def _join(self, seconds: float | None = None) -> bool:
        """Waits until nothing is copied any more, at most `seconds`. Returns whether that is so."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def _work(self) -> None:
        while (checkpoint := self._next()) is not None:
            try:
                self.remote.upload(checkpoint, self.run)
                self._problem, self._copied = None, True
                self.remote.delete(self._surplus(files.step_of(checkpoint) or 0))
                self.remote.delete_incomplete()
            except Exception as error:  # of any library; `problem` reports it
                self._problem = reason(error)
                if isinstance(error, FileNotFoundError) and not checkpoint.exists():
                    self._problem = f"{checkpoint.name} was deleted before it was copied; save less often, or raise "
                    self._problem += "checkpoint.keep_last"

    def _surplus(self, newest: int) -> list[int]:
        """Returns the steps to delete in the store after the upload of `newest`.

        Later ones are among them: the run did not continue from them, because they are damaged or were set aside.
        """
        found = self.remote.steps()
        steps = [step for step in found if step <= newest]
        kept = set(steps)
        with suppress(UserError):
            # The run directory of a host that continued the run does not have all checkpoints of the store.
            best = read_values(self.run / files.FOLDER).best(steps)
            kept = files.kept_steps(steps, self.keep, best) | {newest}
        return [step for step in found if step not in kept]

    def problem(self) -> str | None:
        """Returns why the last checkpoint could not be copied, once; None if it could."""
        found, self._problem = self._problem, None
        if found is None:
            return None
        return f"checkpoint.remote: the checkpoint could not be copied to {masked(self.remote.url)}: {found}"

    def finish(self, seconds: float | None = None) -> str | None:
        """Waits until the last checkpoint is copied. Raises UserError if it could not be.

        Copies the small files once more: the metrics of the last step may be written after its checkpoint.

        Args:
            seconds: how long to wait at most, before a deadline; None: no limit.

        Returns:
            A warning if the time was too short; the next session copies the checkpoint.
        """
        if not self._join(seconds):
            where = f"could not be copied to {masked(self.remote.url)} in time"
            return f"checkpoint.remote: the checkpoint {where} (--stop-within); the same command copies it"
        if self._problem is None:
            try:
                if self._copied:
                    self.remote.upload_side_files(self.run)
                self.remote.delete_incomplete()
            except Exception as error:  # of any library
                self._problem = reason(error)
        if (problem := self.problem()) is not None:
            raise UserError(f"{problem}; the run directory has all checkpoints: run the same command again")
        return None

    def forget_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps, after a rollback. Raises UserError if that fails."""
        with self._lock:
            self._waiting = None
        self._join()
        try:
            self.remote.delete(one for one in self.remote.steps() if one > step)
        except Exception as error:  # of any library
            raise UserError(f"checkpoint.remote: {masked(self.remote.url)}: {reason(error)}") from error

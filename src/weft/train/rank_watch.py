"""Defines `RankWatch`, a thread of a rank that ends it when it hangs, or when it would miss the deadline of a stop."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.files import replace_file
from weft.observe import status
from weft.processes import EXIT_LOST
from weft.torch_private import recorded_collectives
from weft.train.failure_record import RankRecord, collectives_file, stacks_file

if TYPE_CHECKING:
    from weft.train.loop import Loop

POLL = 0.25  # seconds between two looks of the thread
DUMP_SECONDS = 3.0  # seconds in which the other ranks notice that a rank hangs, and write their stacks, too


class RankWatch:
    """Watches this rank from a thread of its own.

    - Hangs. If the rank reports no progress for too long, the thread writes the Python stacks of the rank, and ends the
      process, so that torchrun starts all ranks again. All ranks do so when one does. Under Weft's launcher, which
      decides by the same rule, the thread only writes the record of the last collectives.
    - Deadlines. After SIGTERM, it ends the process when the deadline of `StopRequest` has come.
    - It keeps the record from which the next attempt under torchrun learns how this one failed.

    Without a launcher, ranks are watched if `training.hang_timeout` is set; under torchrun, also if it may restart.

    Args:
        run: the run directory.
        rank, ranks: number of this rank, and of all ranks.
        timeout: `training.hang_timeout`, in seconds; None: adapted to the steps.
        number: number of the attempt, equal on all ranks.

    Attributes:
        loop: the training loop, once it is built.
        record: of this rank; None if no other process would read it.
    """

    def __init__(self, run: Path, rank: int, ranks: int, timeout: float | None, number: int):
        self.run, self.rank, self.ranks, self.timeout = run, rank, ranks, timeout
        self.loop: Loop | None = None
        self.record: RankRecord | None = None
        restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0
        self.decides = not status.connected() and (timeout is not None or restarts)
        self.stacks = stacks_file(run, number)
        self.collectives = collectives_file(run, number, rank)
        self._ended = threading.Event()
        self._dumped = False

    def __enter__(self) -> RankWatch:
        if self.decides:  # else an own pipe has been connected, or nobody looks
            status.begin()
        self._before = self._size()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: Any) -> None:
        self._ended.set()
        if self.record is not None:
            failed = error is not None and isinstance(error, Exception)
            self.record.failed(error) if failed else self.record.remove()

    def _size(self) -> int:
        try:
            return self.stacks.stat().st_size
        except OSError:
            return 0

    def _watch(self) -> None:
        while not self._ended.wait(POLL):
            left = None if self.loop is None else self.loop.state.stop.left
            if left is not None and left < 0:
                self._end_at_deadline()
            quiet = time.monotonic() - status.progress.since
            hangs = quiet > status.progress.allowed(self.timeout)
            if hangs if self.decides else (self.ranks > 1 and hangs and not self._dumped):
                self._hang(quiet)
            elif self.ranks > 1 and not self._dumped and self._size() > self._before:  # another rank hangs
                self._hang(None)

    def _hang(self, quiet: float | None) -> None:
        """Writes what this rank does, and ends it if no launcher decides.

        Args:
            quiet: seconds without progress; None if another rank hangs.
        """
        self._dumped = True
        self._dump_collectives()
        if not self.decides:
            return
        what = f"rank {self.rank} (process {os.getpid()} on {socket.gethostname()}): {status.progress.doing}"
        self._dump_stacks(what)
        text = f"ended after {quiet or 0:.0f} s without progress: {what}; the stacks are in {self.stacks}"
        if quiet is not None:
            print(text, file=sys.stderr, flush=True)
        if self.record is not None:
            self.record.hangs(text)
        until = time.monotonic() + DUMP_SECONDS
        while time.monotonic() < until and self._dumps() < self.ranks:
            time.sleep(POLL / 2)
        if not self._ended.is_set():
            os._exit(EXIT_LOST)

    def _dumps(self) -> int:
        """Returns the number of ranks that have written their stacks in this attempt."""
        with suppress(OSError), self.stacks.open("rb") as file:
            file.seek(self._before)
            return sum(line.startswith(b"rank ") for line in file)
        return 0

    def _dump_stacks(self, what: str) -> None:
        """Appends the Python stacks of all threads to the file of all ranks."""
        with tempfile.TemporaryFile() as own, suppress(OSError):  # a full disk must not keep the process alive
            faulthandler.dump_traceback(own)
            own.seek(0)
            self.stacks.parent.mkdir(parents=True, exist_ok=True)
            with self.stacks.open("ab") as file:
                fcntl.lockf(file, fcntl.LOCK_EX)  # ranks of several hosts append
                file.write(f"{what}\n".encode() + own.read() + b"\n")

    def _dump_collectives(self) -> None:
        """Writes the last collectives of this rank as JSON, by PyTorch's flight recorder."""
        recorded = recorded_collectives()
        if recorded:
            with suppress(OSError):
                self.collectives.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self.collectives, recorded)

    def _end_at_deadline(self) -> None:
        """Ends this process at its deadline. Its exit code depends on whether a checkpoint of the last step exists."""
        assert self.loop is not None
        state, saver = self.loop.state, self.loop.saver
        if self._ended.wait(0):
            return
        local, durable = saver.local_at == state.step, saver.durable_at == state.step
        if self.rank == 0:
            begin = f"step {state.step:,} is not saved in {self.run} within {state.stop.within:g} s (--stop-within)"
            rest = "it is in the local checkpoint, from which the same command resumes on this host"
            if durable:
                begin, rest = f"step {state.step:,} is saved in {self.run}", "the same command resumes from it"
            print(f"{begin}; {rest if local or durable else status.progress.doing}", file=sys.stderr, flush=True)
        os._exit(128 + (state.stop.received or 15) if local or durable else EXIT_LOST)

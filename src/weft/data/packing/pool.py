"""Defines pools of workers that encode the parts of a pack.

Worker processes are new interpreters, so that they inherit neither threads nor locks. They exit when their parent
process exits, and ignore Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from weft.data.packing.part_files import DocumentFailure, Job, Part, WriteFailure
from weft.errors import UserError
from weft.processes import control_groups, die_with, usable_cores

Outcome = tuple[int, BaseException | None]  # the index of a part, and its error (None: it is finished)
OnProgress = Callable[[int, int], None]  # called with the numbers of new raw bytes and tokens


def available_cores() -> int:
    """Returns the number of cores that this process is allowed to use, by its affinity and its container's quota."""
    return min([usable_cores(), *_quotas()])


def _quotas() -> Iterator[int]:
    """Yields the CPU quotas of this process's control group and of its parent groups, rounded up to full cores."""
    for folder, unified in control_groups("cpu"):
        files = ("cpu.max",) if unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            quota, period = " ".join((folder / file).read_text() for file in files).split()
            if int(quota) > 0:
                yield max(1, -(-int(quota) // int(period)))


class Pool:
    """The base class of pools of workers that encode the parts of a pack.

    Attributes:
        warnings: messages about workers that died and whose parts were encoded again.
    """

    warnings: Sequence[str] = ()

    def has_room(self, remaining: int) -> bool:
        """Whether another part can be submitted now. `remaining`: number of parts that are not submitted yet."""
        raise NotImplementedError

    def submit(self, part: Part) -> None:
        """Starts encoding a part of the pack. `wait` returns the outcome."""
        raise NotImplementedError

    def wait(self, block: bool) -> list[Outcome]:
        """Returns the outcomes of the parts that finished or failed since the last call.

        `block`: whether to wait until a worker sends a message, which can also be about progress.
        """
        raise NotImplementedError

    def dismiss(self) -> None:
        """Kills the workers without waiting for their exit. Called when all parts are finished."""

    def close(self) -> None:
        """Kills the workers and waits for their exit; parts in progress stay unfinished."""


class InProcess(Pool):
    """A pool that encodes parts in this process: for small inputs, and for streams that no other process can read."""

    def __init__(self, job: Job, encoder: Any, on_progress: OnProgress):
        self._job, self._encoder, self._on_progress = job, encoder, on_progress
        self._outcomes: list[Outcome] = []

    def has_room(self, remaining: int) -> bool:
        return not self._outcomes

    def submit(self, part: Part) -> None:
        from weft.data.packing.encode_part import encode_part

        failure = None
        try:
            encode_part(self._job, part, self._encoder, on_progress=self._on_progress)
        except Exception as error:  # raised when all earlier parts are appended
            failure = error
        self._outcomes.append((part.index, failure))

    def wait(self, block: bool) -> list[Outcome]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes


class _Worker:
    """The parent's view of a worker process.

    Attributes:
        parts: parts that were sent and are not finished; the first one is in progress.
        singly: whether documents are encoded one at a time and each is reported, to locate a crash.
        at: with `singly`, the location of the document in progress: `unit`, `line` and `before` of DocumentFailure.
    """

    def __init__(self, job: Job, encoder: Any, singly: bool = False):
        parent_end, worker_end = socket.socketpair()
        threads = 1 if singly else job.threads
        environment = os.environ | {
            "RAYON_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": str(threads > 1).lower(),
            # NumPy's threads are for matrix products, and a worker computes none.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        paths = [path or os.getcwd() for path in sys.path]
        program = (
            f"import sys; sys.path[:] = {paths!r}; from weft.data.packing.pool import serve; "
            f"serve({worker_end.fileno()}, {os.getpid()})"
        )
        with worker_end:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[worker_end.fileno()],
                env=environment,
                start_new_session=True,  # so that only the parent receives the terminal's Ctrl-C
            )
        self.connection = Connection(parent_end.detach())
        self.parts: deque[Part] = deque()
        self.singly = singly
        self.at: tuple[int, int | None, int] | None = None
        self.connection.send((job, encoder, singly))

    def send(self, part: Part) -> None:
        self.parts.append(part)
        with contextlib.suppress(OSError):  # the worker died: `LocalPool.wait` handles it
            self.connection.send(part)

    def kill(self) -> int:
        """Kills the process if it is alive; returns its exit code."""
        self.connection.close()
        self.process.kill()
        return self.process.wait()


class LocalPool(Pool):
    """A pool of worker processes on this machine.

    If a worker dies (out of memory, or a crash in a library), a new worker encodes its part again, one document at a
    time. If the new worker dies too, an error names the document.
    """

    def __init__(self, job: Job, encoder: Any, workers: int, on_progress: OnProgress):
        self._job, self._encoder, self._on_progress = job, encoder, on_progress
        self._workers: list[_Worker] = []
        self._requeued: deque[Part] = deque()  # parts that dead workers had not begun
        self.warnings: list[str] = []
        try:
            for _ in range(workers):
                self._workers.append(_Worker(job, encoder))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                what = f"a worker process cannot be started: {error.strerror}; use fewer --workers"
                raise UserError(what) from None
            raise

    def has_room(self, remaining: int) -> bool:
        # While many parts remain, a second part waits at each worker.
        depth = 2 if remaining > 3 * len(self._workers) else 1
        return any(len(worker.parts) < depth and not worker.singly for worker in self._workers)

    def submit(self, part: Part) -> None:
        min((w for w in self._workers if not w.singly), key=lambda w: len(w.parts)).send(part)

    def wait(self, block: bool) -> list[Outcome]:
        ready = wait([worker.connection for worker in self._workers], None if block else 0)
        outcomes: list[Outcome] = []
        for worker in [worker for worker in self._workers if worker.connection in ready]:
            try:
                while worker in self._workers and worker.connection.poll():
                    self._receive(worker, worker.connection.recv(), outcomes)
            except (EOFError, OSError):
                self._handle_death(worker, outcomes)
        return outcomes

    def _receive(self, worker: _Worker, message: tuple[str, Any], outcomes: list[Outcome]) -> None:
        kind, content = message
        if kind == "progress":
            self._on_progress(*content)
        elif kind == "at":
            worker.at = content
        else:
            outcomes.append((worker.parts.popleft().index, content))
            if worker.singly:
                worker.kill()
                self._replace(worker)

    def _replace(self, worker: _Worker, singly: bool = False) -> _Worker:
        new = _Worker(self._job, self._encoder, singly)
        self._workers[self._workers.index(worker)] = new
        while self._requeued and not singly:
            new.send(self._requeued.popleft())
        return new

    def _handle_death(self, worker: _Worker, outcomes: list[Outcome]) -> None:
        code = worker.kill()
        how = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with code {code}"
        if code == -signal.SIGKILL:
            how += ", perhaps out of memory,"
        if not worker.parts:
            raise UserError(f"a worker {how} before it received any work; see its error message above")
        part = worker.parts.popleft()
        self._requeued.extend(worker.parts)
        if not worker.singly:
            self.warnings.append(f"a worker {how} while it encoded {part}; a new worker encoded it again")
            self._replace(worker, singly=True).send(part)
            return
        if worker.at is not None:
            remedy = "remove the document, or use fewer --workers"
            failure = DocumentFailure(
                *worker.at, f"a worker {how} while it encoded this document; this happened twice; {remedy}"
            )
        else:
            failure = UserError(
                f"a worker {how} while it read this input; this happened twice; use fewer --workers", str(part)
            )
        outcomes.append((part.index, failure))
        self._replace(worker)

    def dismiss(self) -> None:
        for worker in self._workers:
            worker.process.kill()

    def close(self) -> None:
        self.dismiss()
        while self._workers:
            self._workers.pop().kill()


def serve(handle: int, parent: int) -> None:
    """Runs a worker process: encodes the parts received from a socket until the socket is closed.

    Args:
        handle: file descriptor of the socket.
        parent: process id of the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    connection = Connection(handle)
    job, encoder, singly = connection.recv()
    from weft.data.packing.encode_part import encode_part

    def on_progress(raw_bytes: int, tokens: int) -> None:
        connection.send(("progress", (raw_bytes, tokens)))

    def on_document(*place: Any) -> None:
        connection.send(("at", place))

    with contextlib.suppress(Exception):  # encoding the first part reports what is wrong with the tokenizer
        tokenizer = encoder.open()
        tokenizer.checked = True
        tokenizer.encode_batch(["a"])  # loads the tokenizer before the first part arrives
    try:
        while True:
            part = connection.recv()
            failure: BaseException | None = None
            try:
                encode_part(job, part, encoder, on_progress=on_progress, on_document=on_document if singly else None)
            except Exception as error:  # the parent raises it when all earlier parts are appended
                failure = picklable(error)
            connection.send(("ended", failure))
    except (EOFError, OSError):  # the parent exited or closed the pool
        os._exit(0)


def picklable(error: Exception) -> Exception:
    """Returns an exception that can be pickled: `error` itself if encoding parts is expected to raise such errors.

    For any other error, returns a RuntimeError whose message contains the traceback.
    """
    if isinstance(error, DocumentFailure | WriteFailure | UserError):
        return error
    return RuntimeError("in a worker:\n" + "".join(traceback.format_exception(error)))

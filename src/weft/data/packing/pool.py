"""The processes that encode a pack's parts: fresh interpreters, so that neither threads nor locks are inherited, which
end with their parent and leave Ctrl-C to it."""

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
from pathlib import Path
from typing import Any

from weft.data.packing.part_files import Job, Part, Stop, Unwritable
from weft.errors import UserError
from weft.processes import die_with

Outcome = tuple[int, BaseException | None]  # a part's number, and what went wrong with it (None: it is done)
OnProgress = Callable[[int, int], None]  # is told new raw bytes and tokens


def available_cores() -> int:
    """The cores that this process may use: its affinity, or fewer where a container has a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, *_quotas(), cores))


def _quotas() -> Iterator[int]:
    """Cores that control groups allow: this process's, and those above it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            top, files = Path("/sys/fs/cgroup"), ("cpu.max",)
        elif "cpu" in controllers.split(","):
            top, files = Path("/sys/fs/cgroup/cpu"), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        else:
            continue
        group = top / name.lstrip("/")
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file there; "max"
                quota, period = " ".join((folder / file).read_text() for file in files).split()
                if int(quota) > 0:
                    yield max(1, -(-int(quota) // int(period)))
            if folder == top:
                break


class Pool:
    """What encodes parts.

    Attributes:
        deaths: of workers whose part was done by another, in words.
    """

    deaths: Sequence[str] = ()

    def room(self, remaining: int) -> bool:
        """Whether a part can be submitted."""
        raise NotImplementedError

    def submit(self, part: Part) -> None:
        """Have a part encoded."""
        raise NotImplementedError

    def wait(self, block: bool) -> list[Outcome]:
        """What has ended since; with `block`, news of some worker is waited for."""
        raise NotImplementedError

    def dismiss(self) -> None:
        """All is done: workers go while this process goes on."""

    def close(self) -> None:
        """End all workers; what they are at is not finished, and will be done anew."""


class InProcess(Pool):
    """One worker that is this process itself: for small inputs, and for what no other process can read."""

    def __init__(self, job: Job, encoder: Any, on_progress: OnProgress):
        self._job, self._encoder, self._on_progress = job, encoder, on_progress
        self._outcomes: list[Outcome] = []

    def room(self, remaining: int) -> bool:
        return not self._outcomes

    def submit(self, part: Part) -> None:
        from weft.data.packing.encode_part import encode_part

        try:
            encode_part(self._job, part, self._encoder, on_progress=self._on_progress)
            self._outcomes.append((part.index, None))
        except Exception as error:  # told at its turn
            self._outcomes.append((part.index, error))

    def wait(self, block: bool) -> list[Outcome]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes


class _Process:
    """A worker as its parent sees it. `parts`: what it has been given and not finished, the first in work."""

    def __init__(self, job: Job, encoder: Any, careful: bool = False):
        ours, theirs = socket.socketpair()
        threads = 1 if careful else job.threads
        environment = os.environ | {
            "RAYON_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": str(threads > 1).lower(),
            # numpy's own threads are for matrices, of which there are none here.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        paths = [path or os.getcwd() for path in sys.path]
        program = (
            f"import sys; sys.path[:] = {paths!r}; from weft.data.packing.pool import serve; "
            f"serve({theirs.fileno()}, {os.getpid()})"
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # the terminal's Ctrl-C is for the parent
            )
        self.connection = Connection(ours.detach())
        self.parts: deque[Part] = deque()
        self.careful = careful
        self.at: tuple[int, int | None, int] | None = None  # in careful work: where the document in work is
        self.connection.send((job, encoder, careful))

    def end(self) -> int:
        """Kill it, if it lives; its exit code."""
        self.connection.close()
        self.process.kill()
        return self.process.wait()


class LocalPool(Pool):
    """Worker processes on this machine.

    A worker that dies (for want of memory, or in a library's crash) gets a successor, which does the part that it died
    in once more, one document at a time; if that one dies too, its document is named.
    """

    def __init__(self, job: Job, encoder: Any, workers: int, on_progress: OnProgress):
        self._job, self._encoder, self._on_progress = job, encoder, on_progress
        self._workers: list[_Process] = []
        self._again: deque[Part] = deque()  # what dead workers had not begun
        self.deaths: list[str] = []
        try:
            for _ in range(workers):
                self._workers.append(_Process(job, encoder))
        except OSError as error:
            self.close()
            raise UserError(f"a worker process cannot be started: {error.strerror}; try fewer --workers") from None
        except BaseException:
            self.close()
            raise

    def room(self, remaining: int) -> bool:
        depth = 2 if remaining > 3 * len(self._workers) else 1  # a second one waits while there are plenty
        return any(len(worker.parts) < depth and not worker.careful for worker in self._workers)

    def submit(self, part: Part) -> None:
        # To the worker that has the least to do.
        self._give(min((w for w in self._workers if not w.careful), key=lambda w: len(w.parts)), part)

    def _give(self, worker: _Process, part: Part) -> None:
        worker.parts.append(part)
        with contextlib.suppress(OSError):  # it died: `wait` will see that
            worker.connection.send(part)

    def wait(self, block: bool) -> list[Outcome]:
        ready = wait([worker.connection for worker in self._workers], None if block else 0)
        outcomes: list[Outcome] = []
        for worker in [worker for worker in self._workers if worker.connection in ready]:
            try:
                while worker in self._workers and worker.connection.poll():
                    self._hear(worker, worker.connection.recv(), outcomes)
            except (EOFError, OSError):
                self._bury(worker, outcomes)
        return outcomes

    def _hear(self, worker: _Process, message: tuple[str, Any], outcomes: list[Outcome]) -> None:
        kind, content = message
        if kind == "progress":
            self._on_progress(*content)
        elif kind == "at":
            worker.at = content
        else:
            outcomes.append((worker.parts.popleft().index, content))
            if worker.careful:
                worker.end()
                self._replace(worker)

    def _replace(self, worker: _Process, careful: bool = False) -> _Process:
        new = _Process(self._job, self._encoder, careful)
        self._workers[self._workers.index(worker)] = new
        if not careful:
            while self._again:
                self._give(new, self._again.popleft())
        return new

    def _bury(self, worker: _Process, outcomes: list[Outcome]) -> None:
        code = worker.end()
        how = f"killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
        if code == -signal.SIGKILL:
            how += ", perhaps for want of memory"
        if not worker.parts:
            raise UserError(f"a worker was {how} before it had anything to do; what it said is above")
        part = worker.parts.popleft()
        self._again.extend(worker.parts)
        if not worker.careful:
            self.deaths.append(f"a worker was {how} in {part}; that was done again")
            self._give(self._replace(worker, careful=True), part)
            return
        if worker.at is not None:
            what = Stop(*worker.at, f"a worker was {how} at this document, twice; take it out, or use fewer --workers")
        else:
            what = UserError(f"a worker was {how} while it read this, twice; try fewer --workers", str(part))
        outcomes.append((part.index, what))
        self._replace(worker)

    def dismiss(self) -> None:
        for worker in self._workers:
            worker.process.kill()

    def close(self) -> None:
        self.dismiss()
        while self._workers:
            self._workers.pop().end()


def serve(handle: int, parent: int) -> None:
    """A worker's life: take parts from the socket `handle` until that closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    connection = Connection(handle)
    job, encoder, careful = connection.recv()
    from weft.data.packing.encode_part import encode_part

    def on_progress(raw_bytes: int, tokens: int) -> None:
        connection.send(("progress", (raw_bytes, tokens)))

    def on_document(*place: Any) -> None:
        connection.send(("at", place))

    with contextlib.suppress(Exception):  # what is wrong with it is told with the first part
        tokenizer = encoder.open()
        tokenizer.checked = True
        tokenizer.encode_batch(["a"])  # loads it, while the first part is on its way
    try:
        while True:
            part = connection.recv()
            failure: BaseException | None = None
            try:
                encode_part(job, part, encoder, on_progress=on_progress, on_document=on_document if careful else None)
            except Exception as error:  # the parent tells it, at its turn
                failure = portable(error)
            connection.send(("ended", failure))
    except (EOFError, OSError):  # the parent is gone, or has enough
        os._exit(0)


def portable(error: Exception) -> Exception:
    """The error as it can travel: one that nobody expected keeps its traceback as text."""
    if isinstance(error, Stop | Unwritable | UserError):
        return error
    return RuntimeError("in a worker:\n" + "".join(traceback.format_exception(error)))

"""Prefetches batches in worker processes, and reports when a worker dies."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from weft.data.batches.batch import Batch
from weft.errors import UserError

T = TypeVar("T")


class Source(Protocol):
    """A source of batches by step, such as `weft.data.batches.loader.BatchSource`."""

    def batch(self, step: int) -> Batch: ...

    def where(self, step: int) -> str: ...


# The path of a socket has at most 107 bytes. In the temporary folder the socket is pymp-xxxxxxxx/listener-xxxxxxxx.
LONGEST_TMPDIR = 107 - 32
POLL = 0.5  # seconds until a worker notices that the training process was killed


def prefetch(source: Source, start: int, stop: int, workers: int) -> Iterator[Batch]:
    """Yields the batches of steps `start` to `stop - 1` in order, read by `workers` processes.

    Raises:
        UserError: reading a batch raised a UserError, or a worker died. If a worker died, the message names the signal
            or exit code, and the samples that the worker was reading.
    """
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TMPDIR:  # the first batch would never arrive
        raise UserError(
            f"the path of the temporary folder, {tempfile.gettempdir()}, is too long for the sockets of data workers; "
            f"set TMPDIR to a path of at most {LONGEST_TMPDIR} bytes, or data.workers to 0"
        )
    reading = torch.full((workers, 2), -1, dtype=torch.int64).share_memory_()  # process id and step of each worker
    loader = DataLoader(
        _Steps(source, reading),
        batch_size=None,
        sampler=range(start, stop),
        num_workers=workers,
        worker_init_fn=_initialize_worker,
        pin_memory=torch.cuda.is_available(),
    )
    before = multiprocessing.active_children()
    watch = _WorkerWatch()
    with _ready_to_fork():
        batches = iter(loader)
    watch.begin([child for child in multiprocessing.active_children() if child not in before])
    died = None
    try:
        while True:
            batch = watch.wait(lambda: next(batches, None))
            if batch is None or isinstance(batch, UserError):
                break
            yield batch
    except _WorkerDied:
        died = _describe_death(source, reading, watch.dead)
    finally:
        watch.end()
        batches = iter(())  # stops the workers now, not when the frames of an exception are freed
    if died is not None:
        raise UserError(died)
    if isinstance(batch, UserError):
        raise batch


@contextmanager
def _ready_to_fork() -> Iterator[None]:
    """Context in which workers are started.

    - Workers inherit blocked signals, so a SIGTERM that arrives while they start does not kill them.
    - A forked worker never frees garbage of this process: the destructor of a process group or of a store waits for
      threads, which a fork does not copy, so the worker would hang. The worker also copies less memory. It starts
      without garbage collection, which `_initialize_worker` enables.
    """
    blocked, collects = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class _WorkerDied(Exception):
    """A worker process has died."""


class _WorkerWatch:
    """Detects dead workers, but raises an exception only while the main process waits for a batch.

    PyTorch's own SIGCHLD handler raises at any point of the main process, for example during an optimizer update.
    """

    def __init__(self) -> None:
        self.children: list[multiprocessing.process.BaseProcess] = []
        self.waiting = False
        self.main = threading.current_thread() is threading.main_thread()
        self.before = signal.getsignal(signal.SIGCHLD)

    @property
    def dead(self) -> list[multiprocessing.process.BaseProcess]:
        """The workers that crashed, were killed, or exited with an error."""
        return [child for child in self.children if not child.is_alive() and child.exitcode]

    def begin(self, children: list[multiprocessing.process.BaseProcess]) -> None:
        """Starts to watch the workers `children`, and replaces the SIGCHLD handler."""
        self.children = children
        if self.main:
            signal.signal(signal.SIGCHLD, self._on_sigchld)

    def end(self) -> None:
        """Restores the SIGCHLD handler."""
        if self.main:
            signal.signal(signal.SIGCHLD, self.before or signal.SIG_DFL)

    def wait(self, function: Callable[[], T]) -> T:
        """Returns the result of a function that waits for workers.

        Raises:
            _WorkerDied: a worker has died.
        """
        self.waiting = True
        try:
            if self.dead:
                raise _WorkerDied
            return function()
        except (RuntimeError, OSError, EOFError):
            # Raised by PyTorch, or because a batch's shared memory was freed when its worker died.
            self.waiting = False
            ended = multiprocessing.connection.wait([child.sentinel for child in self.children], timeout=1)
            for child in self.children:
                child.join(1 if child.sentinel in ended else 0)
            if not self.dead:
                raise
            raise _WorkerDied from None
        finally:
            self.waiting = False

    def _on_sigchld(self, number: int, frame: object) -> None:
        if self.waiting and self.dead:
            raise _WorkerDied


class _Steps(TorchDataset):
    def __init__(self, source: Source, reading: torch.Tensor):
        self.source, self.reading = source, reading

    def __getitem__(self, step: int) -> Batch | UserError:
        info = get_worker_info()
        if info is not None:
            self.reading[info.id] = torch.tensor([os.getpid(), step])
        try:
            return self.source.batch(step)
        except UserError as error:
            return error  # raised in the training process: DataLoader would wrap it in a traceback


def _initialize_worker(worker: int) -> None:
    gc.freeze()  # what a fork inherited
    gc.enable()
    # Ctrl-C and SIGTERM can reach all processes of the group. The trainer needs batches until it has saved a
    # checkpoint, and then stops its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    threading.Thread(target=_exit_with_trainer, args=(trainer,), daemon=True).start()
    sys.excepthook = _print_unless_disconnected


def _exit_with_trainer(trainer: multiprocessing.process.BaseProcess) -> None:
    """Makes this worker exit when the training process ends, or sends SIGTERM to stop a hanging worker.

    SIGTERM of other processes is ignored. A worker is a child of the training process only if it was forked: the start
    method "forkserver", Python 3.14's default, has a server that forks. PyTorch compares the parent's id, and so misses
    that the training process was killed. A pipe shows its end with each start method. If it was forked, processes
    that were forked later hold the pipe open, too, but then its id is no longer that of the parent.
    """
    parent, pid = os.getppid(), trainer.pid
    while not (multiprocessing.connection.wait([trainer.sentinel], timeout=0) or os.getppid() != parent):
        if not hasattr(signal, "sigtimedwait"):
            time.sleep(POLL)
            continue
        found = signal.sigtimedwait({signal.SIGTERM}, POLL)
        if found is not None and found.si_pid == pid:
            break
    os._exit(0)


def _print_unless_disconnected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints a traceback, unless the training process exited while this worker was sending a batch."""
    if not isinstance(error, (OSError, EOFError)):
        sys.__excepthook__(kind, error, trace)


def _describe_death(source: Source, reading: torch.Tensor, dead: list[multiprocessing.process.BaseProcess]) -> str:
    steps = dict(reading.tolist())
    deaths = []
    for child in dead:
        code = child.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        step = steps.get(child.pid or -1, -1)
        last = f"; it last read step {step + 1:,}, {source.where(step)}" if step >= 0 else ""
        deaths.append(f"a data worker (process {child.pid}) {how}{last}")
    remedy = "if memory ran out, lower data.workers; the same command resumes from the last checkpoint, if there is one"
    return f"{' and '.join(deaths) or 'a data worker died'}; {remedy}"

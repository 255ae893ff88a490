"""Processes that read batches ahead, and what is said when one of them dies."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from weft.data.batches.batch import Batch
from weft.errors import UserError

T = TypeVar("T")


class Source(Protocol):
    """Batches as a function of the step (`weft.data.batches.loader.BatchSource`)."""

    def batch(self, step: int) -> Batch: ...

    def where(self, step: int) -> str: ...


# A socket's path has at most 107 bytes; below the temporary folder it is /pymp-xxxxxxxx/listener-xxxxxxxx.
LONGEST_TMPDIR = 107 - 32


def read_ahead(source: Source, start: int, stop: int, workers: int) -> Iterator[Batch]:
    """The batches of steps `start` to `stop - 1`, in order, read by `workers` processes.

    Raises:
        UserError: what a worker raised; or that one was killed, by what, and which samples it was reading.
    """
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TMPDIR:  # else the first batch would be waited for for ever
        raise UserError(
            f"the path of the temporary folder, {tempfile.gettempdir()}, is too long for the sockets of data workers; "
            f"set TMPDIR to one of at most {LONGEST_TMPDIR} bytes, or data.workers to 0"
        )
    reading = torch.full((workers, 2), -1, dtype=torch.int64).share_memory_()  # of each worker: process and step
    loader = DataLoader(
        _Steps(source, reading),
        batch_size=None,
        sampler=range(start, stop),
        num_workers=workers,
        worker_init_fn=_begin_quietly,
        pin_memory=torch.cuda.is_available(),
    )
    before = multiprocessing.active_children()
    watch = _Watch()
    # Workers inherit what is blocked here: a signal that comes while they start must not end them.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    watch.begin([child for child in multiprocessing.active_children() if child not in before])
    died = None
    try:
        while True:
            batch = watch.during(lambda: next(batches, None))
            if batch is None or isinstance(batch, UserError):
                break
            yield batch
    except _Died:
        died = _what_died(source, reading, watch.dead)
    finally:
        watch.end()
        batches = iter(())  # ends the workers now, not when an exception's frames are forgotten
    if died is not None:
        raise UserError(died)
    if isinstance(batch, UserError):
        raise batch


class _Died(Exception):
    """A worker is gone."""


class _Watch:
    """Learns at once of a worker's death, but speaks of it only where a batch is waited for.

    PyTorch's own handler of SIGCHLD raises wherever the main process happens to be: in the middle of an update, say.
    """

    def __init__(self) -> None:
        self.children: list[multiprocessing.process.BaseProcess] = []
        self.waiting = False
        self.main = threading.current_thread() is threading.main_thread()
        self.before = signal.getsignal(signal.SIGCHLD)

    @property
    def dead(self) -> list[multiprocessing.process.BaseProcess]:
        """Workers that ended otherwise than in peace."""
        return [child for child in self.children if not child.is_alive() and child.exitcode]

    def begin(self, children: list[multiprocessing.process.BaseProcess]) -> None:
        """Take the signal over."""
        self.children = children
        if self.main:
            signal.signal(signal.SIGCHLD, self._told)

    def end(self) -> None:
        """Give it back."""
        if self.main:
            signal.signal(signal.SIGCHLD, self.before or signal.SIG_DFL)

    def during(self, act: Callable[[], T]) -> T:
        """Do what waits for workers.

        Raises:
            _Died: one is gone.
        """
        self.waiting = True
        try:
            if self.dead:
                raise _Died
            return act()
        except (RuntimeError, OSError, EOFError):
            # What PyTorch makes of it; or a batch was announced, and its memory went with the worker that had it.
            self.waiting = False
            ended = multiprocessing.connection.wait([child.sentinel for child in self.children], timeout=1)
            for child in self.children:
                child.join(1 if child.sentinel in ended else 0)
            if not self.dead:
                raise
            raise _Died from None
        finally:
            self.waiting = False

    def _told(self, number: int, frame: object) -> None:
        if self.waiting and self.dead:
            raise _Died


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


def _begin_quietly(worker: int) -> None:
    # Ctrl-C and SIGTERM may reach the whole group; the trainer needs its batches until it has saved, and ends its
    # workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_leave_when_told, args=(os.getppid(),), daemon=True).start()
    sys.excepthook = _say_unless_unplugged


def _leave_when_told(trainer: int) -> None:
    """Only the trainer's own SIGTERM counts: it ends so a worker that is stuck in a sample."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)


def _say_unless_unplugged(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The training process may leave while a batch is being handed over: that is nothing to print a traceback for."""
    if not isinstance(error, (OSError, EOFError)):
        sys.__excepthook__(kind, error, trace)


def _what_died(source: Source, reading: torch.Tensor, dead: list[multiprocessing.process.BaseProcess]) -> str:
    steps = dict(reading.tolist())
    parts = []
    for child in dead:
        code = child.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        step = steps.get(child.pid or -1, -1)
        what = f"; it last read step {step + 1:,}, {source.where(step)}" if step >= 0 else ""
        parts.append(f"a data worker (process {child.pid}) was {how}{what}")
    said = " and ".join(parts) or "a data worker is gone"
    advice = "if memory ran out, lower data.workers; run the same command again to go on from the last checkpoint"
    return f"{said}; {advice}"

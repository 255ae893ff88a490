"""N processes of this command on this machine: started, watched, stopped together."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from weft.errors import UserError
from weft.launch.failures import EXIT_BY_SIGNAL, EXIT_LOST, account_for, how_to_go_on, say
from weft.observe import status
from weft.processes import LAUNCHER, STORE_SOCKET, die_with

POLL = 0.1  # seconds
STOP_SECONDS = 30.0  # after a signal, ranks that make no progress for this long are killed
FAIL_SECONDS = 10.0  # after the failure of a rank, the others can only end
TELL_SECONDS = 5.0  # without progress after a signal, until the launcher says what it waits for
NAMED = 4  # ranks in a message
PROCESSES_PER_CORE = 16  # each takes 0.2 GB and more; so many share a core only where a mesh is tried out


@dataclass
class Rank:
    """A rank's process, and what it reported last."""

    number: int
    process: subprocess.Popen
    pipe: int
    unread: bytes = b""
    doing: str = "starting"
    since: float = field(default_factory=time.monotonic)
    longest: float = 0.0  # seconds between its last few reports
    may_take: float = 0.0  # seconds that it asks for
    message: Any = None  # why it failed
    ended: float | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exitcode(self) -> int:
        return self.process.returncode

    def read(self) -> bool:
        """Take in what it has written; False at the end."""
        data = os.read(self.pipe, 1 << 16)
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            report = json.loads(line)
            self.message = report.get("failed", self.message)
            if "doing" in report:
                self.doing, self.longest, self.may_take = report["doing"], report["longest"], report["may_take"]
                self.since = time.monotonic()
        return bool(data)

    def __str__(self) -> str:
        return f"rank {self.number} (process {self.pid}{', stopped by a signal' * self.is_stopped}): {self.doing}"

    @property
    def is_stopped(self) -> bool:
        """Whether somebody sent it SIGSTOP, or a debugger holds it."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state in "Tt"


class LocalRanks:
    """The ranks of one launch.

    Attributes:
        received: signals to the launcher.
        ending: when the ranks were asked to end, by a signal or because one of them failed.
        killed: the numbers of those that had to be killed.
    """

    def __init__(self, command: Sequence[str], nproc: int, run_directory: Path):
        self.run_directory = run_directory
        self.received: list[int] = []
        self.ending: float | None = None
        self.killed: set[int] = set()
        self.told = False
        self.pipes = selectors.DefaultSelector()
        self.ranks: list[Rank] = []
        try:
            with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:  # of the first rank's store
                for number in range(nproc):
                    self.ranks.append(start_rank(command, number, nproc, listener))
                    self.pipes.register(self.ranks[-1].pipe, selectors.EVENT_READ, self.ranks[-1])
        except OSError as error:
            self.send(signal.SIGKILL)
            for rank in self.ranks:
                rank.process.wait()
                os.close(rank.pipe)
            self.pipes.close()
            what = f"rank {len(self.ranks)} of {nproc} cannot be started: {error.strerror or error}"
            raise UserError(f"{what}; ask for fewer processes (--nproc), or raise the system's limits") from None

    def wait(self) -> None:
        """Until all have ended."""
        while alive := [rank for rank in self.ranks if rank.ended is None]:
            self.listen(POLL)
            for rank in alive:
                if rank.process.poll() is not None:
                    rank.ended = time.monotonic()
            alive = [rank for rank in alive if rank.ended is None]
            if self.ending is None and (self.received or any(rank.exitcode for rank in self.ranks if rank.ended)):
                self.ending = time.monotonic()
                self.send(signal.SIGTERM)
            if self.ending is not None and alive and not self.killed:
                self.hurry(alive, self.ending)
        self.listen(0)

    def listen(self, seconds: float) -> None:
        """Read reports; wait so long for the first of them."""
        while ready := self.pipes.select(seconds):
            for key, _ in ready:
                if not key.data.read():
                    self.pipes.unregister(key.fd)
                    os.close(key.fd)
            seconds = 0

    def send(self, number: int) -> None:
        """A signal to all that are left."""
        for rank in self.ranks:
            if rank.ended is None:
                rank.process.send_signal(number)

    def hurry(self, alive: list[Rank], since: float) -> None:
        """Say what is waited for; kill ranks that make no progress. One that saves a checkpoint makes some."""
        quiet = time.monotonic() - max(since, *(rank.since for rank in alive))
        asked_for = max(max(2 * rank.longest, rank.may_take) for rank in alive)
        most = STOP_SECONDS + asked_for if self.received else FAIL_SECONDS
        # One that is stopped holds up the others.
        order = sorted(alive, key=lambda rank: (not rank.is_stopped, rank.number))
        shown = "; ".join(map(str, order[:NAMED])) + (f"; and {len(alive) - NAMED} more" if len(alive) > NAMED else "")
        if self.received.count(signal.SIGINT) > 1 or quiet > most:
            self.killed = {rank.number for rank in alive}
            self.send(signal.SIGKILL)
            why = f"killed after {quiet:.0f} s without progress" if quiet > most else "killed at the second Ctrl-C"
            say(f"{why}: {shown}; {how_to_go_on(self.run_directory)}")
        elif self.received and quiet > TELL_SECONDS and not self.told:
            self.told = True
            say(f"waiting for {shown}; killed in {most - quiet:.0f} s without progress (a second Ctrl-C: now)")

    def exit_code(self) -> int:
        """What the launcher ends with; what is to be said of ranks that failed is printed."""
        if self.killed and self.received:
            return 128 + signal.SIGINT if self.received.count(signal.SIGINT) > 1 else EXIT_LOST
        by_end = sorted(self.ranks, key=lambda rank: rank.ended or 0)
        failures = {rank.number: rank for rank in by_end if rank.exitcode and rank.number not in self.killed}
        if not failures:
            return 0
        peaceful = (-signal.SIGTERM, -signal.SIGINT, *EXIT_BY_SIGNAL)
        if self.received and all(rank.exitcode in peaceful for rank in failures.values()):
            return 128 + self.received[0]
        return account_for(failures, self.run_directory)


def start_rank(command: Sequence[str], number: int, nproc: int, listener: socket.socket) -> Rank:
    """Start one rank, with torchrun's environment and a share of the cores.

    Args:
        listener: the first rank's store answers at it.
    """
    reading, writing = os.pipe()
    environment = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // nproc)),
        **os.environ,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        LAUNCHER: f"{os.getpid()} {writing}",
    }
    handles = [writing]
    if number == 0:
        environment[STORE_SOCKET] = str(listener.fileno())
        handles.append(listener.fileno())
    try:
        process = subprocess.Popen(command, env=environment, pass_fds=handles, start_new_session=True)
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return Rank(number, process, reading)


def launch_local(command: Sequence[str], nproc: int, run_directory: Path) -> int:
    """Run `command` as ranks 0 to `nproc` - 1 and wait for them.

    SIGTERM and SIGINT to this process ask all ranks to save a checkpoint and end. Each rank dies with this process,
    however that ends.

    Returns:
        0, 128 + the signal's number, 3 if ranks had to be killed, or what `account_for` makes of those that failed.

    Raises:
        UserError: one cannot be started; those that were are killed.
    """
    received: list[int] = []
    with signals_noted(received):
        ranks = LocalRanks(command, nproc, run_directory)
        ranks.received = received
        try:
            ranks.wait()
        finally:
            ranks.send(signal.SIGKILL)
    return ranks.exit_code()


@contextmanager
def signals_noted(received: list[int]) -> Iterator[None]:
    """Append SIGTERM and SIGINT to `received` in place of what they do otherwise."""

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    if threading.current_thread() is not threading.main_thread():  # elsewhere Python allows no handlers
        yield
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def join_launcher() -> None:
    """In a rank: report to the launcher that started it, and end when that is gone. Without one: nothing."""
    launcher = os.environ.pop(LAUNCHER, None)  # a process that this one starts has another parent
    if launcher is not None:
        process, pipe = map(int, launcher.split())
        os.set_inheritable(pipe, False)
        status.connect(pipe)
        die_with(process)


def checked_nproc(nproc: int | None) -> int:
    """The number of processes that the user asked for; by default one for each GPU, or one.

    Raises:
        UserError: not positive, more than there are GPUs, or more than any machine's memory has room for.
    """
    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc {nproc}: at least 1 process is needed")
    import torch

    gpus = torch.cuda.device_count()
    if nproc is None:
        return max(1, gpus)
    if gpus and nproc > gpus:
        raise UserError(f"--nproc {nproc}: this machine has {gpus} GPUs; ask for at most that")
    cores = os.cpu_count() or 1
    if nproc > PROCESSES_PER_CORE * cores:
        raise UserError(
            f"--nproc {nproc}: this machine has {cores} cores; ask for at most {PROCESSES_PER_CORE * cores}"
        )
    return nproc

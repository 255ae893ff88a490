"""The local launcher, which starts, watches and stops N processes of a command on this machine."""

from __future__ import annotations

import faulthandler
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from weft.errors import UserError
from weft.formatting import first_few
from weft.launch.failures import (
    EXIT_BY_SIGNAL,
    Verdict,
    judge_failures,
    print_error,
    report_verdict,
    resume_hint,
)
from weft.launch.hang import HangWatch
from weft.launch.rank import STACKS_SIGNAL, Rank, start_rank
from weft.observe import status
from weft.processes import ELASTIC, EXIT_LOST, LAUNCHER, die_with, signal_handler, take_command
from weft.train.stop import reserve, stop_within

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # ask a run to save and exit
POLL = 0.1  # seconds between two checks of the processes
STOP_SECONDS = 30.0  # after a signal, ranks are killed if they make no progress for this time
FAIL_SECONDS = 10.0  # after a rank failed, the other ranks are killed if they make no progress for this time
# After a signal, the launcher prints what it waits for if no rank makes progress for this time.
WAIT_MESSAGE_SECONDS = 5.0
NAMED = 4  # maximum number of ranks that a message lists
# Files of drivers: without any of them, PyTorch finds no GPU. CUDA's first call after a boot may have to make
# /dev/nvidia*, by nvidia-modprobe.
GPU_PATHS = (
    "/dev/nvidia*",
    "/proc/driver/nvidia",
    "/usr/bin/nvidia-modprobe",
    "/dev/nvhost*",  # Jetson
    "/dev/nvmap",  # Jetson
    "/dev/dxg",  # WSL
    "/dev/kfd",  # AMD
)
PROCESSES_PER_CORE = 16  # a process takes 0.2 GB or more; more than a few per core are useful only to try out a mesh


class LocalRanks:
    """The ranks that a launcher started.

    Attributes:
        received: signals that the launcher received.
        ending: time at which the launcher asked the ranks to end, because of a signal or a failed rank; None until
            then.
        stopped: whether a signal to the launcher was the reason.
        killed: the ranks that the launcher killed.
        watch: detects ranks that hang; None: they are not detected.
        within: seconds after SIGTERM or SIGHUP in which all processes must end; None: no deadline.
        hang: the verdict about ranks that hung; None if no rank hung.
    """

    def __init__(
        self,
        command: Sequence[str],
        nproc: int,
        run_directory: Path | None,
        received: list[int],
        watch: HangWatch | None = None,
    ):
        self.run_directory, self.received, self.watch = run_directory, received, watch
        self.within = stop_within()
        self.hang: Verdict | None = None
        self.ending: float | None = None
        self.stopped = False
        self.killed: set[int] = set()
        self.warned = False
        self.pipes = selectors.DefaultSelector()
        self.ranks: list[Rank] = []
        attempt = 1 if watch is None else watch.attempt
        try:
            with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:  # for the TCPStore of rank 0
                for number in range(nproc):
                    # The first rank keeps a terminal, on which it shows its progress.
                    keeps_stderr = run_directory is not None and not (number == 0 and os.isatty(2))
                    rank = start_rank(command, number, nproc, listener, keeps_stderr, attempt)
                    self.ranks.append(rank)
                    self.pipes.register(rank.pipe, selectors.EVENT_READ, rank.read)
                    if hasattr(os, "pidfd_open"):  # Linux: wakes the launcher at once when the rank ends
                        ended = os.pidfd_open(rank.pid)
                        self.pipes.register(ended, selectors.EVENT_READ, lambda: False)
                    if rank.stderr is not None:
                        self.pipes.register(rank.stderr, selectors.EVENT_READ, rank.forward_stderr)
        except OSError as error:
            self.send(signal.SIGKILL)
            for rank in self.ranks:
                rank.process.wait()
            self.close()
            what = f"rank {len(self.ranks)} of {nproc} cannot be started: {error.strerror or error}"
            raise UserError(f"{what}; use fewer processes (--nproc), or raise the system's limits") from None

    def close(self) -> None:
        """Closes the pipes. A process that a rank started may still hold the other end of one."""
        for key in list(self.pipes.get_map().values()):
            os.close(key.fd)
        self.pipes.close()
        for rank in self.ranks:
            rank.stacks.close()

    def wait(self) -> None:
        """Waits until all ranks have ended.

        After a signal or the failure of a rank, asks the remaining ranks to end, and kills them if they are stuck.
        """
        while any(rank.ended is None for rank in self.ranks):
            self.read_reports(POLL)
            for rank in self.ranks:
                if rank.ended is None and rank.process.poll() is not None:
                    rank.ended = time.monotonic()
            alive = [rank for rank in self.ranks if rank.ended is None]
            if self.ending is None and (self.received or any(rank.exitcode for rank in self.ranks if rank.ended)):
                self.ending, self.stopped = time.monotonic(), bool(self.received)
                if self.watch is not None and not self.received and any(r.exitcode < 0 for r in self.ranks if r.ended):
                    self.killed = {rank.number for rank in alive}  # nothing is left to save or to report
                self.send(signal.SIGKILL if self.killed else signal.SIGTERM)
            if self.ending is None and self.watch is not None and self.watch.hangs(alive):
                self.kill_hung(alive, self.watch)
            if self.ending is not None and alive and not self.killed:
                self.kill_if_stuck(alive, self.ending)
        self.read_reports(0)
        self.close()

    def read_reports(self, seconds: float) -> None:
        """Reads all reports that ranks have sent. If there are none yet, waits up to `seconds` for the first."""
        while ready := self.pipes.select(seconds):
            for key, _ in ready:
                if not key.data():
                    self.pipes.unregister(key.fd)
                    os.close(key.fd)
            seconds = 0

    def send(self, number: int) -> None:
        """Sends signal `number` to all ranks that have not ended."""
        for rank in self.ranks:
            if rank.ended is None:
                rank.process.send_signal(number)

    def kill_hung(self, alive: list[Rank], watch: HangWatch) -> None:
        """Writes the stacks of all ranks, and kills them, because a rank hangs."""
        order = watch.hung_first(alive)
        quiet = time.monotonic() - order[0].since
        text = f"killed after {quiet:.0f} s without progress: {first_few([str(rank) for rank in order], NAMED, '; ')}"
        if watch.dump(order):
            text += f"; the stacks of all ranks are in {watch.stacks}"
        self.hang = Verdict(order[0].number, EXIT_LOST, text, restartable=True)
        for rank in alive:  # what a suspended rank reports while it writes its stacks is not what it hung in
            if rank.pipe in self.pipes.get_map():
                self.pipes.unregister(rank.pipe)
                os.close(rank.pipe)
        self.ending, self.killed = time.monotonic(), {rank.number for rank in alive}
        self.send(signal.SIGKILL)

    def kill_if_stuck(self, alive: list[Rank], since: float) -> None:
        """Kills the remaining ranks if they make no progress after they were asked to end, or at the second Ctrl-C.

        If a signal ends the run, and the ranks make no progress for some seconds, first prints what they are doing.

        Args:
            alive: the ranks that have not ended.
            since: time at which the ranks were asked to end.
        """
        quiet = time.monotonic() - max(since, *(rank.since for rank in alive))
        allowed = max(max(2 * rank.longest, rank.may_take) for rank in alive)
        most = STOP_SECONDS + allowed if self.received else FAIL_SECONDS
        late = False
        if self.within is not None and self.received and signal.SIGINT not in self.received:
            late = time.monotonic() - since > self.within - reserve(self.within) / 2
        # A suspended rank delays the other ranks, so it is listed first.
        order = sorted(alive, key=lambda rank: (not rank.is_stopped, rank.number))
        shown = first_few([str(rank) for rank in order], NAMED, "; ")
        if self.received.count(signal.SIGINT) > 1 or quiet > most or late:
            self.killed = {rank.number for rank in alive}
            self.send(signal.SIGKILL)
            why = f"killed after {quiet:.0f} s without progress" if quiet > most else "killed at the second Ctrl-C"
            why = f"killed at the deadline of {self.within:g} s (--stop-within)" if late else why
            print_error(f"{why}: {shown}; {resume_hint(self.run_directory)}")
        elif self.received and quiet > WAIT_MESSAGE_SECONDS and not self.warned:
            self.warned = True
            print_error(
                f"waiting for {shown}; the launcher kills them in {most - quiet:.0f} s if they make no progress (press "
                "Ctrl-C again to kill them now)"
            )

    def verdict(self) -> Verdict:
        """Returns what ended the ranks. Its code is 0 if all of them succeeded."""
        if self.hang is not None:  # a signal that came meanwhile does not hide it
            return self.hang
        if self.killed and self.stopped:
            return Verdict(None, 128 + signal.SIGINT if self.received.count(signal.SIGINT) > 1 else EXIT_LOST)
        by_end = sorted(self.ranks, key=lambda rank: rank.ended or 0)
        failures = {rank.number: rank for rank in by_end if rank.exitcode and rank.number not in self.killed}
        if not failures:
            return Verdict(None, 0)
        stopped = (-signal.SIGTERM, -signal.SIGINT, *EXIT_BY_SIGNAL)
        if self.received and all(rank.exitcode in stopped for rank in failures.values()):
            silent = self.ranks[0].exitcode < 0  # it did not handle signals yet, so it said nothing
            how = "interrupted" if self.received[0] == signal.SIGINT else "terminated"
            return Verdict(None, 128 + self.received[0], how if silent else "")
        if self.ending is not None:  # what the launcher asked for after the first failure is not a failure
            first = {n: f for n, f in failures.items() if (f.ended or 0) <= self.ending or f.exitcode not in stopped}
            failures = first or failures
        return judge_failures(failures)


def launch_local(command: Sequence[str], nproc: int, run_directory: Path | None) -> int:
    """Runs `command` in `nproc` processes, as ranks 0 to `nproc` - 1, and waits until all ranks have ended.

    SIGTERM, SIGINT and SIGHUP to this process ask all ranks to save a checkpoint and exit. If this process ends in any
    way, its ranks are killed.

    Args:
        run_directory: the directory of the run, in which messages look up the last checkpoint and the logs. None if
            `command` does not train.

    Returns:
        The exit code: 0 if all ranks succeeded, 128 + the number of a signal that stopped the ranks, 3 if ranks had to
        be killed after a signal, or else the result of `judge_failures`.

    Raises:
        UserError: a rank cannot be started. The ranks that were started are killed.
    """
    received: list[int] = []
    with signal_handler(lambda number, frame: received.append(number), *SIGNALS):
        ranks = run_once(command, nproc, run_directory, received)
    return report_verdict(ranks.verdict(), run_directory)


def run_once(
    command: Sequence[str],
    nproc: int,
    run_directory: Path | None,
    received: list[int],
    watch: HangWatch | None = None,
) -> LocalRanks:
    """Starts the ranks and waits until all have ended. Arguments: see `LocalRanks`."""
    ranks = LocalRanks(command, nproc, run_directory, received, watch)
    try:
        ranks.wait()
    finally:
        ranks.send(signal.SIGKILL)
    return ranks


def join_launcher() -> None:
    """Connects this rank to the local launcher that started it, if any. The rank is killed when the launcher ends."""
    if ELASTIC in os.environ:
        die_with(int(os.environ[ELASTIC].split()[0]))
    take_command()
    launcher = os.environ.pop(LAUNCHER, None)  # child processes must not connect to the launcher
    if launcher is not None:
        process, pipe, stacks = map(int, launcher.split())
        os.set_inheritable(pipe, False)
        os.set_inheritable(stacks, False)
        faulthandler.register(STACKS_SIGNAL, file=stacks)
        status.connect(pipe)
        die_with(process)


def checked_nproc(nproc: int | None, option: str = "--nproc") -> int:
    """Returns the number of local processes: `nproc`; if None, the number of GPUs, or 1 without a GPU.

    Args:
        option: name of the command-line option that set `nproc`, for messages.

    Raises:
        UserError: `nproc` is below 1, above the number of GPUs, or above PROCESSES_PER_CORE per core.
    """
    if nproc is not None and nproc < 1:
        raise UserError(f"{option} {nproc}: use at least 1 process")
    gpus, cores = gpu_count(), os.cpu_count() or 1
    if nproc is None:
        return max(1, gpus)
    if gpus and nproc > gpus:
        raise UserError(f"{option} {nproc}: this machine has {gpus} GPUs; use at most {gpus} processes")
    if nproc > PROCESSES_PER_CORE * cores:
        raise UserError(
            f"{option} {nproc}: this machine has {cores} cores; use at most {PROCESSES_PER_CORE * cores} processes"
        )
    return nproc


def gpu_count() -> int:
    """Returns the number of GPUs that PyTorch can use. Imports torch only if the machine may have one."""
    if not any(glob(path) for path in GPU_PATHS):
        return 0
    import torch

    return torch.cuda.device_count()

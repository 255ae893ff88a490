"""The supervisor, which starts the ranks of a training run again after one of them died, and records each failure."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weft.formatting import counted
from weft.launch.failures import Verdict, print_error, report_verdict
from weft.launch.hang import HangWatch
from weft.launch.local import POLL, SIGNALS, LocalRanks, run_once
from weft.launch.rank import Rank
from weft.processes import signal_handler, signal_name
from weft.train.failure_record import LINES, append_failure, last_checkpoint

# Seconds before a restart. The first one is at once; the delay is doubled while the run makes no progress.
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
SAME_STEP = 3  # failures in one step, after which the run stops: the cause is the step, not the machine


@dataclass
class Supervisor:
    """Decides whether a failed attempt is followed by another one, and when.

    Attributes:
        most: maximum number of restarts, in all or within `window`.
        hang_timeout: `training.hang_timeout` of the run, in seconds; None: adapted to the steps.
        window: seconds in which restarts are counted; None: all restarts count.
        restarts: times of the restarts.
        reached: the last step that any attempt began; 0 before the first step.
        without_progress: number of restarts since `reached` last increased.
        failed_in: (last failed step, number of successive failures in it).
    """

    most: int = 0
    window: float | None = None
    hang_timeout: float | None = None
    restarts: list[float] = field(default_factory=list)
    reached: int = 0
    without_progress: int = 0
    failed_in: tuple[int, int] = (0, 0)

    @property
    def needed(self) -> bool:
        """Whether ranks must be processes of their own, so that they can be restarted, or killed if they hang."""
        return self.most > 0 or self.hang_timeout is not None

    def watch(self, run_directory: Path) -> HangWatch | None:
        """Returns the detection of ranks that hang for the next attempt."""
        return HangWatch(self.hang_timeout, run_directory, len(self.restarts) + 1) if self.needed else None

    def delay(self, step: int, killed: bool) -> tuple[float | None, str]:
        """Returns the seconds to wait before a restart, or None and the reason why there is no restart.

        Args:
            step: the step in which the attempt failed; 0 before the first step.
            killed: whether SIGKILL ended the rank. Before the first step, it says nothing about the run.
        """
        if step > self.reached:
            self.reached, self.without_progress = step, 0
        last, count = self.failed_in
        self.failed_in = step, (count + 1 if step == last and (step or not killed) else 1)
        if self.most and self.failed_in[1] >= SAME_STEP:
            where = f"in step {step:,}" if step else "before the first step"
            return None, f"the run failed {SAME_STEP} times {where}, without progress; it is not restarted again"
        now_, since = time.monotonic(), self.window
        recent = [then for then in self.restarts if since is None or now_ - then < since]
        if len(recent) >= self.most:
            within = f" within {since:g} s" if since is not None else ""
            return None, f"no restart is left of {self.most}{within} (--max-restarts)" if self.most else ""
        self.restarts.append(now_)
        self.without_progress += 1
        if self.without_progress == 1:
            return 0.0, ""
        return min(LONGEST_DELAY, FIRST_DELAY * 2 ** (self.without_progress - 2)), ""


def supervise(
    command: Sequence[str], nproc: int, run_directory: Path, supervisor: Supervisor, once: Sequence[str] = ()
) -> int:
    """Trains in `nproc` processes, and starts them again after a failure, until the supervisor gives up.

    Each failure is recorded in `logs/failures.jsonl` of the run directory. SIGTERM, SIGINT and SIGHUP to this process
    ask the ranks to save a checkpoint and exit, and end the supervision.

    Args:
        command: the command of a rank.
        once: options of the command until training has begun, such as `--fresh`, which must not start over a run that
            has begun.

    Returns:
        The exit code, as `launch_local` does.
    """
    received: list[int] = []
    with signal_handler(lambda number, frame: received.append(number), *SIGNALS):
        while True:
            began = time.time()
            options = () if supervisor.reached else once
            watch = supervisor.watch(run_directory)
            ranks = run_once([*command, *options], nproc, run_directory, received, watch)
            verdict = ranks.verdict()
            if verdict.code == 0 or received or not verdict.restartable:
                return report_verdict(verdict, run_directory)
            rank = ranks.ranks[verdict.rank or 0]
            killed = rank.exitcode == -signal.SIGKILL and ranks.hang is None
            delay, reason = supervisor.delay(max((rank.step or 0) for rank in ranks.ranks), killed)
            record(run_directory, verdict, ranks, began, len(supervisor.restarts) + (delay is None), delay is not None)
            if delay is None:
                if reason:
                    print_error(reason)
                return report_verdict(verdict, run_directory)
            announce(verdict, rank, run_directory, supervisor, delay)
            until = time.monotonic() + delay
            while time.monotonic() < until and not received:
                time.sleep(POLL)
            if received:
                return 128 + received[0]


def announce(verdict: Verdict, rank: Rank, run_directory: Path, supervisor: Supervisor, delay: float) -> None:
    """Prints what failed, and from where the run restarts."""
    what = verdict.text or f"rank {rank.number} (process {rank.pid}) exited with code {rank.exitcode}"
    saved, _ = last_checkpoint(run_directory)
    where = f"from the checkpoint of step {saved:,}" if saved else "from the beginning"
    count = f"restart {len(supervisor.restarts)} of {supervisor.most}"
    if supervisor.window is not None:
        count = f"restart {len(supervisor.restarts)}, at most {supervisor.most} in {supervisor.window:g} s,"
    when = f"in {counted(round(delay), 'second')}" if delay else "now"
    print_error(f"{what}; {count} {where} {when}")


def record(
    run_directory: Path, verdict: Verdict, ranks: LocalRanks, began: float, attempt: int, restarted: bool
) -> None:
    """Records the failure of an attempt in `logs/failures.jsonl`.

    Args:
        began: time at which the attempt was started, in seconds since 1970.
        attempt: number of the attempt, counted from 1.
        restarted: whether the supervisor starts another attempt.
    """
    rank = ranks.ranks[verdict.rank or 0]
    reported = isinstance(rank.message, dict) and rank.message["extraInfo"]["py_callstack"].splitlines()
    lines = [line.decode(errors="replace") for line in rank.last_lines]
    append_failure(
        run_directory,
        attempt=attempt,
        rank=verdict.rank,
        host=socket.gethostname(),
        hang=ranks.hang is not None,
        exit_code=rank.exitcode if rank.exitcode >= 0 else None,
        signal=signal_name(-rank.exitcode) if rank.exitcode < 0 and ranks.hang is None else None,
        step=max((rank.step or 0) for rank in ranks.ranks),
        doing=rank.doing,
        stderr=[line for line in reported or lines if line][-LINES:],
        began=began,
        at=time.time(),
        restarted=restarted,
    )

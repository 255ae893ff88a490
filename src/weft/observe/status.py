"""Keeps the status of a rank: current work and failures. Reports it to the local launcher, as lines of JSON in a pipe.

Without Weft's launcher, nothing is reported, but `progress` is kept for a watch within the process.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

LONG = 600.0  # seconds allowed between reports in a save or the end of a run (slow disks, tracker servers)
START_SECONDS = 1800.0  # until a rank has made its first steps: loading, compilation, connections of many hosts
FIRST_STEPS = 2  # steps that may take START_SECONDS; the second one still compiles if shapes vary
LEAST_SECONDS, SLOWER = 60.0, 10  # without a configured time-out: SLOWER times the longest recent step, at least this
_WAIT = 5.0  # seconds for the launcher to read the report of a failure
_pipe: int | None = None
_kind = ""  # of the last report
_intervals: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=8))  # kind -> durations of the last intervals
_lock = threading.Lock()  # several threads write the files of a checkpoint


@dataclass(kw_only=True)
class Progress:
    """The last activity that a rank reported.

    Attributes:
        step: number of the training step that the rank last began, counted from 1; None before the first step.
        first_step: the first step that the rank began.
        doing: the rank's last reported activity.
        since: time of the last report.
        longest: the longest time between recent reports, in seconds.
        may_take: seconds that the current activity may take without a report, even if `longest` is shorter.
    """

    step: int | None = None
    first_step: int | None = None
    doing: str = "starting"
    since: float = field(default_factory=time.monotonic)
    longest: float = 0.0
    may_take: float = 0.0

    def update(self, report: dict[str, Any]) -> None:
        """Takes over a report: `doing`, `longest`, `may_take` and `step`."""
        self.doing, self.longest, self.may_take = report["doing"], report["longest"], report["may_take"]
        self.step, self.since = report["step"], time.monotonic()
        self.first_step = self.step if self.first_step is None else self.first_step

    def allowed(self, timeout: float | None) -> float:
        """Returns the seconds that the rank may be without a report; if it takes longer, it hangs.

        A save, a validation or another long task may take the time that the rank asked for, even if it is longer.

        Args:
            timeout: `training.hang_timeout`, in seconds; None: adapted to the time of the recent steps.
        """
        if self.step is None or self.first_step is None or self.step < self.first_step + FIRST_STEPS:
            return max(START_SECONDS, self.may_take)
        steps = timeout if timeout is not None else max(LEAST_SECONDS, SLOWER * self.longest)
        return max(steps, self.may_take)


progress = Progress()  # of this process


def begin() -> None:
    """Forgets the activities of an earlier training in this process."""
    global _kind
    _kind = ""
    _intervals.clear()
    for one in fields(Progress):
        setattr(progress, one.name, getattr(Progress(), one.name))


def connect(pipe: int | None) -> None:
    """Makes later reports go to the pipe with the file descriptor `pipe`; None turns reports off."""
    global _pipe
    if pipe is not None:
        os.set_blocking(pipe, False)
    _pipe = pipe
    begin()


def connected() -> bool:
    """Whether a launcher reads the reports."""
    return _pipe is not None


def doing(what: str, kind: str = "step", may_take: float = 0.0, step: int | None = None) -> None:
    """Reports that this rank starts some work, which lasts until the next report. Never blocks.

    The launcher considers a rank stuck if it receives no report for much longer than the rank's longest recent interval
    between reports.

    Args:
        what: a description of the work.
        kind: the kind of the work. The last intervals of each kind are kept, so that many short intervals of one kind
            do not displace the long intervals of another kind.
        may_take: number of seconds that the launcher allows for the work even if earlier intervals were shorter.
        step: number of the training step that begins, counted from 1; None if no step begins.
    """
    global _kind, _began
    with _lock:
        now = time.monotonic()
        if _kind:
            _intervals[_kind].append(now - _began)
        longest = max((max(seconds) for seconds in _intervals.values()), default=0.0)
        step = progress.step if step is None else step
        _kind, _began = kind, now
        progress.update({"doing": what, "longest": longest, "may_take": may_take, "step": step})
    _report()


_began = 0.0  # time of the last call of `doing`


def alive() -> None:
    """Reports that the current work makes progress, by repeating the last report."""
    if _kind:
        progress.since = time.monotonic()
        _report()


def _report() -> None:
    if _pipe is not None:
        names = ("doing", "longest", "may_take", "step")
        with suppress(OSError):  # the launcher is busy, or gone
            os.write(_pipe, _line({name: getattr(progress, name) for name in names}))


def failed(failure: dict[str, Any]) -> bool:
    """Reports why this rank exits, as JSON values. Returns False if no launcher reads the report."""
    if _pipe is None:
        return False
    left = _line({"failed": failure})
    try:
        while left:
            if not select.select([], [_pipe], [], _WAIT)[1]:
                return False
            left = left[os.write(_pipe, left[: select.PIPE_BUF]) :]
    except OSError:
        return False
    return True


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"

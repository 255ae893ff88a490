"""Reports the status of a rank to its local launcher: current work and failures, as lines of JSON in a pipe.

Without Weft's launcher, nothing is reported.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections import defaultdict, deque
from contextlib import suppress
from typing import Any

LONG = 600.0  # seconds allowed between reports in a save or the end of a run (slow disks, tracker servers)
_WAIT = 5.0  # seconds for the launcher to read the report of a failure
_pipe: int | None = None
_last: tuple[str, float, bytes] | None = None  # kind, time and bytes of the last report
_step: int | None = None  # the step that this rank last began
_intervals: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=8))  # kind -> durations of the last intervals
_lock = threading.Lock()  # several threads write the files of a checkpoint


def connect(pipe: int | None) -> None:
    """Makes later reports go to the pipe with the file descriptor `pipe`; None turns reports off."""
    global _pipe, _last, _step
    if pipe is not None:
        os.set_blocking(pipe, False)
    _pipe, _last, _step = pipe, None, None
    _intervals.clear()


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
    global _last, _step
    if _pipe is None:
        return
    with _lock:
        now = time.monotonic()
        if _last is not None:
            _intervals[_last[0]].append(now - _last[1])
        longest = max((max(seconds) for seconds in _intervals.values()), default=0.0)
        _step = _step if step is None else step
        _last = kind, now, _line({"doing": what, "longest": longest, "may_take": may_take, "step": _step})
    alive()


def alive() -> None:
    """Reports that the current work makes progress, by repeating the last report."""
    if _pipe is not None and _last is not None:
        with suppress(OSError):  # the launcher is busy, or gone
            os.write(_pipe, _last[2])


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

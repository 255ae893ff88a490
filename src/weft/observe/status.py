"""Status reports of a rank to its local launcher: current work and failures, as lines of JSON in a pipe.

Without Weft's own launcher nothing is reported.
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

LONG = 600.0  # seconds that a save or the end of a run may take between two reports: a slow disk, a tracker's server
_WAIT = 5.0  # seconds for the launcher to read the report of a failure
_pipe: int | None = None
_last: tuple[str, float, bytes] | None = None  # kind, time and bytes of the last report
_intervals: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=8))  # kind of work -> its last seconds
_lock = threading.Lock()  # several threads write the files of a checkpoint


def connect(pipe: int | None) -> None:
    """Sends reports to this pipe from now on; None turns reports off."""
    global _pipe, _last
    if pipe is not None:
        os.set_blocking(pipe, False)
    _pipe, _last = pipe, None
    _intervals.clear()


def connected() -> bool:
    """Whether a launcher reads the reports."""
    return _pipe is not None


def doing(what: str, kind: str = "step", may_take: float = 0.0) -> None:
    """Reports that work begins, which lasts until the next report. Never blocks, and costs microseconds.

    The launcher considers a rank stuck if it reports nothing for much longer than the longest of its recent intervals.

    Args:
        kind: intervals are kept for each kind of work, so that many short ones do not displace the longest.
        may_take: the minimum of seconds to allow, whatever earlier work of this kind took.
    """
    global _last
    if _pipe is None:
        return
    with _lock:
        now = time.monotonic()
        if _last is not None:
            _intervals[_last[0]].append(now - _last[1])
        longest = max((max(seconds) for seconds in _intervals.values()), default=0.0)
        _last = kind, now, _line({"doing": what, "longest": longest, "may_take": may_take})
    alive()


def alive() -> None:
    """Reports progress within the current work."""
    if _pipe is not None and _last is not None:
        with suppress(OSError):  # the launcher is busy, or gone
            os.write(_pipe, _last[2])


def failed(failure: dict[str, Any]) -> bool:
    """Reports why this rank exits; returns False if no launcher reads it."""
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

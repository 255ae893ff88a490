"""What this rank reports to the launcher that watches it: what it is doing, and why it failed. Lines of JSON in a pipe.

A run without Weft's own launcher reports nothing.
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

_WAIT = 5.0  # seconds for a launcher to read the reason of a failure
_pipe: int | None = None
_last: tuple[str, float, bytes] | None = None  # the last report: its kind, when, and what was written
_intervals: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=8))  # kind of work -> its last seconds
_lock = threading.Lock()  # a checkpoint's files are written by several threads
LONG = 600.0  # seconds that saving, or ending a run, may take between two reports: a slow disk, somebody's server


def connect(pipe: int | None) -> None:
    """Report to this pipe from now on; None: to nobody."""
    global _pipe, _last
    if pipe is not None:
        os.set_blocking(pipe, False)
    _pipe, _last = pipe, None
    _intervals.clear()


def connected() -> bool:
    """Whether a launcher listens."""
    return _pipe is not None


def doing(what: str, kind: str = "step", may_take: float = 0.0) -> None:
    """Report progress: from one report to the next, something was done. Never waits, and costs microseconds.

    The launcher takes a rank for stuck that reports nothing for much longer than the longest of its last few intervals
    of any kind: a short interval of one kind says nothing of the others.

    Args:
        kind: of the work that begins here and lasts until the next report.
        may_take: seconds that it may take, however long others of its kind took.
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
    """Report progress within what was reported last, which goes on."""
    if _pipe is not None and _last is not None:
        with suppress(OSError):  # the launcher is busy, or gone
            os.write(_pipe, _last[2])


def failed(word: dict[str, Any]) -> bool:
    """Report why this rank ends; False if nobody listens."""
    if _pipe is None:
        return False
    left = _line({"failed": word})
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

"""Helpers for processes: the launcher's environment variables, signal handlers, ending a process with its parent."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LAUNCHER = "WEFT_LAUNCHER"  # environment variable of a rank: the launcher's process id and the pipe that it reads
STORE_SOCKET = "WEFT_STORE_SOCKET"  # environment variable of rank 0: a listening socket for its store


def usable_cores() -> int:
    """Returns the number of cores that this process is allowed to use: its affinity, or all cores on other systems than
    Linux.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent, the process `parent`, ends or is killed (Linux only)."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # takes 10 ms

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the call


@contextmanager
def signal_handler(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Handles the signals `numbers` with `handler` within the context.

    Outside the main thread the context does nothing, because Python sets signal handlers only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)

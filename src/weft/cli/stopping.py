"""SIGTERM handling: a verb stops as at Ctrl-C and removes its unfinished output."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from weft.processes import signal_handler


class Terminated(KeyboardInterrupt):
    """Raised at SIGTERM. A subclass of KeyboardInterrupt, so the same cleanup runs as at Ctrl-C."""


@contextmanager
def terminable() -> Iterator[None]:
    """Context in which SIGTERM raises Terminated in this process. Forked child processes terminate immediately."""
    owner = os.getpid()

    def terminate(number: int, frame: object) -> None:
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        raise Terminated

    with signal_handler(terminate, signal.SIGTERM):
        yield

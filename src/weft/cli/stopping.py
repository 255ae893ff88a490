"""SIGTERM handling: a subcommand stops as after Ctrl-C, and deletes its unfinished output."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from weft.processes import signal_handler


class Terminated(KeyboardInterrupt):
    """Raised at SIGTERM. It is a subclass of KeyboardInterrupt, so that the same cleanup runs as after Ctrl-C."""


@contextmanager
def terminable() -> Iterator[None]:
    """Context in which SIGTERM raises Terminated in this process, but terminates forked child processes immediately."""
    owner = os.getpid()

    def terminate(number: int, frame: object) -> None:
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        raise Terminated

    with signal_handler(terminate, signal.SIGTERM):
        yield

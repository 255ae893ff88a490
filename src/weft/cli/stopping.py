"""SIGTERM, which schedulers and `kill` send, ends a verb as Ctrl-C does: what is half made is taken away."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from weft.processes import signal_handler


class Terminated(KeyboardInterrupt):
    """SIGTERM: it ends a verb as Ctrl-C does."""


@contextmanager
def terminable() -> Iterator[None]:
    """Within it, SIGTERM raises Terminated in this process; those forked from it end at once, as without it."""
    owner = os.getpid()

    def terminate(number: int, frame: object) -> None:
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        raise Terminated

    with signal_handler(terminate, signal.SIGTERM):
        yield

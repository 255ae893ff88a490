"""Handling of SIGTERM and SIGHUP: a subcommand stops as after Ctrl-C, and deletes its unfinished output."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from weft.processes import signal_handler


class Terminated(KeyboardInterrupt):
    """Raised at SIGTERM or SIGHUP. A subclass of KeyboardInterrupt, so that the same cleanup runs as after Ctrl-C."""


def report_stop(leaving: KeyboardInterrupt, hint: str = "") -> int:
    """Prints how the subcommand was stopped, and returns its exit code.

    Args:
        leaving: the exception that a signal raised. `Terminated` has the number of the signal.
        hint: what to add to the line.
    """
    terminated = isinstance(leaving, Terminated)
    with suppress(OSError):  # after SIGHUP, the terminal may be closed
        print(f"{'terminated' if terminated else 'interrupted'}{hint}", file=sys.stderr, flush=True)
    return 128 + (leaving.args[0] if terminated else signal.SIGINT)


@contextmanager
def terminable() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise Terminated in this process, but end forked child processes at once."""
    owner = os.getpid()

    def terminate(number: int, frame: object) -> None:
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        raise Terminated(number)

    with signal_handler(terminate, signal.SIGTERM, signal.SIGHUP):
        yield

"""Defines `StopRequest`, by which a signal or a callback on any rank stops the run, and `Outcome`, how a run ended."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from weft.errors import UserError

STOP_WITHIN = "WEFT_STOP_WITHIN"  # environment variable: seconds after SIGTERM or SIGHUP in which all processes end


def stop_within() -> float | None:
    """Returns the seconds in which the processes of a run must end after SIGTERM or SIGHUP; None: no deadline.

    Raises:
        UserError: the environment variable that sets it is not a positive number.
    """
    given = os.environ.get(STOP_WITHIN)
    if not given:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not (0 < seconds < math.inf):
        raise UserError(f"--stop-within, {STOP_WITHIN}: {given} is not a number of seconds above 0")
    return seconds


def reserve(within: float) -> float:
    """Returns the seconds of `stop_within` that are kept for the end of the processes."""
    return min(2.0, 0.1 * within)


class StopRequest:
    """The requests on this rank to stop the run. A second SIGINT raises KeyboardInterrupt.

    Attributes:
        received: the signal that this rank received; None if it received no signal.
        reason: the reason that a callback on this rank gave for stopping; None without a request.
        within: see `stop_within`.
        deadline: time (`time.monotonic`) at which this process must begin to exit; None without a deadline.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    BY_CALLBACK = 0  # in place of a signal's number

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.reason: str | None = None
        self.within = stop_within()
        self.deadline: float | None = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Records the signal `number`. This method is the handler of `SIGNALS`."""
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        if self.within is not None and number != signal.SIGINT and self.deadline is None:
            self.deadline = time.monotonic() + self.within - reserve(self.within)

    @property
    def left(self) -> float | None:
        """Seconds until the deadline of this rank; None without a deadline."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    def agree_on_deadline(self) -> float | None:
        """Makes the first deadline of a rank that of all ranks. Returns the seconds until it; None without one.

        Every rank must call it.
        """
        from weft.parallel.ranks import (
            all_gather_object,
        )  # not above: the launcher, which needs no torch, imports this file

        left = min((seconds for seconds in all_gather_object(self.left) if seconds is not None), default=None)
        if left is not None:
            self.deadline = time.monotonic() + left
        return left

    @property
    def votes(self) -> list[float]:
        """This rank's votes, to be summed over all ranks: 1 or 0 for each signal, then for a callback's request."""
        return [*(float(self.received == number) for number in self.SIGNALS), float(self.reason is not None)]

    @classmethod
    def decide(cls, votes: Sequence[float]) -> int | None:
        """Returns the decision of all ranks from the summed votes: a signal, `BY_CALLBACK`, or None to continue."""
        numbers = (*cls.SIGNALS, cls.BY_CALLBACK)
        return next((int(number) for number, vote in zip(numbers, votes, strict=True) if vote), None)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a training session: one start or resumption of the run, until the run ends or stops.

    Attributes:
        status: "finished"; "stopped" by a signal; "stopped-early" by a callback; "non-finite" after a loss or
            gradient that is not finite; "spike"; or "corruption" (see `watch`).
        step: number of updates of all sessions, including skipped updates; a checkpoint of this step exists, unless the
            status is "corruption", or `training.sync_every` found a bad step after its update.
        loss: the loss of the last update, in nats per token (or per unit of the objective's weight); None if this
            session made no update.
        validation: the metrics of the session's last validation.
        signal: the signal that stopped the run.
        reason: the reason that a callback gave for stopping the run.
    """

    status: str
    step: int
    loss: float | None
    validation: dict[str, float]
    signal: int | None = None
    reason: str | None = None

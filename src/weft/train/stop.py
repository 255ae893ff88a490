"""Requests to stop a run: SIGTERM or SIGINT on any rank, or a callback. The loop saves a checkpoint and exits."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType


class StopRequest:
    """What was asked of this rank. A second SIGINT raises KeyboardInterrupt.

    Attributes:
        received: the signal that this rank received.
        reason: why a callback on this rank asked to stop; None if none did.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    BY_CALLBACK = 0  # in place of a signal's number

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.reason: str | None = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

    @property
    def votes(self) -> list[float]:
        """1 for the signal that this rank received, and for a callback's request; to be summed over all ranks."""
        return [*(float(self.received == number) for number in self.SIGNALS), float(self.reason is not None)]

    @classmethod
    def decide(cls, votes: Sequence[float]) -> int | None:
        """Returns the decision of all ranks from the summed votes: a signal, `BY_CALLBACK`, or None to continue."""
        numbers = (*cls.SIGNALS, cls.BY_CALLBACK)
        return next((int(number) for number, vote in zip(numbers, votes, strict=True) if vote), None)

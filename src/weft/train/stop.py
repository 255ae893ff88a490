"""SIGTERM and SIGINT, to any rank, ask the loop to save and leave, as callbacks may; a second SIGINT leaves at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any


class StopSignal:
    """A context in which the two signals set `received` in place of ending the process.

    Attributes:
        received: the signal that came to this rank.
        reason: why a callback on this rank asked to stop; None if none did.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM)
    ASKED = 0  # in the place of a signal's number: a callback's request

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.reason: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in self.NUMBERS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def votes(self) -> list[float]:
        """1 for the signal that came to this rank, and for a request; to be summed over all ranks."""
        return [*(float(self.received == number) for number in self.NUMBERS), float(self.reason is not None)]

    @classmethod
    def agreed(cls, votes: Sequence[float]) -> int | None:
        """What the summed votes say on all ranks alike: the signal's number, `ASKED`, or None to go on."""
        numbers = (*cls.NUMBERS, cls.ASKED)
        return next((int(number) for number, vote in zip(numbers, votes, strict=True) if vote), None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

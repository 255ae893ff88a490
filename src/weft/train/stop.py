"""SIGTERM and SIGINT ask the loop to save and leave; a second SIGINT leaves at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class StopSignal:
    """A context in which the two signals set `received` in place of ending the process."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

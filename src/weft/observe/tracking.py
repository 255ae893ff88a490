"""All trackers of a run behind one: a tracker that fails while the run goes on costs a warning, not the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from weft.config.components import load_class
from weft.config.section import Component
from weft.observe.console import Console
from weft.observe.logs import LOGGER
from weft.observe.run_info import RunInfo

PAUSE = 60.0  # seconds for which a tracker that failed is left alone: a server that times out must not slow each step


class Tracker(Protocol):
    """What a tracker is. Its constructor takes the `RunInfo`, then its own configuration keys.

    It may have `failures`, the exceptions (besides OSError) with which its backend says that it cannot be reached just
    now, and `place`, where to look at what it tracks.
    """

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Note the numbers of one step: a line of metrics.jsonl."""

    def text(self, step: int, name: str, text: str) -> None:
        """Note a text, such as a sample."""

    def close(self) -> None:
        """Send what is left, and end."""


class Tracking:
    """The trackers of `log.trackers`; made by the one process that speaks.

    A tracker that cannot be *started* is a UserError: the user is still watching. One that fails later (its `failures`,
    OSError) is warned about once and left alone for a minute at a time; `close` says how much it missed; all is in
    metrics.jsonl. Other exceptions are mistakes in the tracker's code and are raised.
    """

    def __init__(self, parts: Sequence[str | Component], run: RunInfo, console: Console):
        self._console = console
        self._trackers: list[_Guarded] = []
        for part in parts:
            name, arguments = (part, {}) if isinstance(part, str) else (part.type, part.arguments)
            tracker = load_class(part, "tracker")(run, **arguments)
            self._trackers.append(_Guarded(name, tracker, console))
            if place := getattr(tracker, "place", None):
                console.line(f"{name}: {place}")

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """As `Tracker.log`, to each."""
        for tracker in self._trackers:
            tracker.attempt(lambda to: to.log(step, metrics))

    def text(self, step: int, name: str, text: str) -> None:
        """As `Tracker.text`, to each."""
        for tracker in self._trackers:
            tracker.attempt(lambda to: to.text(step, name, text))

    def close(self) -> None:
        """End each, and say what was missed. Safe to call twice."""
        for tracker in self._trackers:
            tracker.paused_until = 0.0
            tracker.attempt(lambda to: to.close())
            if tracker.missed:
                self._console.warning(f"{tracker.name} missed {tracker.missed} records; metrics.jsonl has all")
        self._trackers = []


class _Guarded:
    """One tracker and how it has been doing."""

    def __init__(self, name: str, tracker: Tracker, console: Console, clock: Callable[[], float] = time.monotonic):
        self.name, self.tracker, self.console, self.clock = name, tracker, console, clock
        self.failures = (OSError, *getattr(tracker, "failures", ()))
        self.missed, self.paused_until = 0, 0.0

    def attempt(self, act: Callable[[Tracker], None]) -> None:
        if self.clock() < self.paused_until:
            self.missed += 1
            return
        try:
            act(self.tracker)
        except self.failures as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if not self.missed:
                self.console.warning(f"{self.name} failed ({reason}); training goes on; metrics.jsonl has all")
            LOGGER.warning("%s failed: %s", self.name, error)
            self.missed += 1
            self.paused_until = self.clock() + PAUSE

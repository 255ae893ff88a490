"""Sends metrics to the trackers of a run; a tracker that fails during the run causes a warning and does not stop it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from weft.config.components import load_class
from weft.config.section import Component
from weft.observe.console import Console
from weft.observe.logs import LOGGER
from weft.observe.run_info import RunInfo

PAUSE = 60.0  # seconds without calls after a failure, so that a server that times out does not slow each step


class Tracker(Protocol):
    """The interface of trackers. The constructor takes the `RunInfo`, then the configuration keys.

    Optional attributes: `failures`, the exceptions (besides OSError) that mean that the backend cannot be reached now;
    and `place`, where the user finds what is tracked.
    """

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Receives the numbers of one step: a line of metrics.jsonl."""

    def text(self, step: int, name: str, text: str) -> None:
        """Receives a text, such as a sample."""

    def close(self) -> None:
        """Flushes and closes the tracker."""


class Tracking:
    """The trackers of `log.trackers`, on the first rank.

    An exception of a constructor is raised: the user still watches. Later failures (the tracker's `failures`, OSError)
    are warned about once, and the tracker gets no calls for a minute; `close` reports how many records it missed, which
    metrics.jsonl has. Other exceptions are bugs of the tracker and are raised.
    """

    def __init__(self, components: Sequence[str | Component], run: RunInfo, console: Console):
        self._console = console
        self._trackers: list[_GuardedTracker] = []
        for component in components:
            name, arguments = (component, {}) if isinstance(component, str) else (component.type, component.arguments)
            tracker = load_class(component, "tracker")(run, **arguments)
            self._trackers.append(_GuardedTracker(name, tracker, console))
            if place := getattr(tracker, "place", None):
                console.line(f"{name}: {place}")

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Calls `Tracker.log` of each."""
        for tracker in self._trackers:
            tracker.call("log", step, metrics)

    def text(self, step: int, name: str, text: str) -> None:
        """Calls `Tracker.text` of each."""
        for tracker in self._trackers:
            tracker.call("text", step, name, text)

    def close(self) -> None:
        """Closes each and reports missed records. May be called twice."""
        for tracker in self._trackers:
            tracker.paused_until = 0.0
            tracker.call("close")
            if tracker.missed:
                self._console.warning(f"{tracker.name} missed {tracker.missed} records; metrics.jsonl has all")
        self._trackers = []


class _GuardedTracker:
    """A tracker, and its failures so far."""

    def __init__(self, name: str, tracker: Tracker, console: Console, clock: Callable[[], float] = time.monotonic):
        self.name, self.tracker, self.console, self.clock = name, tracker, console, clock
        self.failures = (OSError, *getattr(tracker, "failures", ()))
        self.missed, self.paused_until = 0, 0.0

    def call(self, method: str, *arguments: Any) -> None:
        if self.clock() < self.paused_until:
            self.missed += 1
            return
        try:
            getattr(self.tracker, method)(*arguments)
        except self.failures as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if not self.missed:
                self.console.warning(f"{self.name} failed ({reason}); training continues; metrics.jsonl has all")
            LOGGER.warning("%s failed: %s", self.name, error)
            self.missed += 1
            self.paused_until = self.clock() + PAUSE

"""Sends metrics to the trackers of a run. A tracker that fails during the run causes a warning; the run continues."""

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
    """The interface of trackers. The constructor gets the `RunInfo`, and configuration keys as keyword arguments.

    A tracker can also have these attributes:

    - `failures`: the exception types, besides OSError, that mean that the backend cannot be reached.
    - `place`: where the user finds the tracked run, such as a URL.
    """

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Logs the metrics of one step, with the keys of a line of metrics.jsonl."""

    def text(self, step: int, name: str, text: str) -> None:
        """Logs a text, such as a sample, under a name."""

    def close(self) -> None:
        """Flushes and closes the tracker."""


class Tracking:
    """The trackers of `log.trackers`, on the first rank.

    An exception in a constructor is raised, because a user sees it at the start of the run. A later failure (one of the
    tracker's `failures`, or OSError) causes a warning, and the tracker is not called for a minute. `close` reports how
    many calls the tracker missed; metrics.jsonl has all metrics. Other exceptions are bugs of the tracker and are
    raised.
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
        """Logs the metrics of one step with all trackers."""
        for tracker in self._trackers:
            tracker.call("log", step, metrics)

    def text(self, step: int, name: str, text: str) -> None:
        """Logs a text under a name with all trackers."""
        for tracker in self._trackers:
            tracker.call("text", step, name, text)

    def close(self) -> None:
        """Closes the trackers, and reports how many calls each tracker missed. Can be called twice."""
        for tracker in self._trackers:
            tracker.paused_until = 0.0
            tracker.call("close")
            if tracker.missed:
                self._console.warning(f"{tracker.name} missed {tracker.missed} records; metrics.jsonl has all metrics")
        self._trackers = []


class _GuardedTracker:
    """Calls a tracker, and counts the calls that the tracker missed because of failures."""

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
                self.console.warning(
                    f"{self.name} failed ({reason}); training continues; metrics.jsonl has all metrics"
                )
            LOGGER.warning("%s failed: %s", self.name, error)
            self.missed += 1
            self.paused_until = self.clock() + PAUSE

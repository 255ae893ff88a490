"""A clock with streams: computation, and collectives beside it that slow it down."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field


class Parts(defaultdict[str, float]):
    """Seconds by cause; 0 for a cause that is not named."""

    def __init__(self, seconds: Mapping[str, float] | None = None):
        super().__init__(float, seconds or {})

    def plus(self, other: Mapping[str, float], times: float = 1.0) -> Parts:
        """Returns the sum with `times` the seconds of `other`."""
        total = Parts(self)
        for name, seconds in other.items():
            total[name] += seconds * times
        return total


@dataclass(frozen=True)
class Event:
    """A span of one stream.

    Attributes:
        stream: `compute`, or the axis that communicates.
        name: what runs, such as `forward`.
        start, end: seconds from the start of the step.
    """

    stream: str
    name: str
    start: float
    end: float


@dataclass
class Timeline:
    """The streams of one rank.

    Attributes:
        slowdown: fraction by which computation is slower while a collective runs.
        now: when the computation so far has ended.
        parts: seconds of computation by kind, and seconds that it waited for communication, or was slowed, by axis.
        events: what ran, in the order of issue.
    """

    slowdown: float = 0.0
    now: float = 0.0
    parts: Parts = field(default_factory=Parts)
    events: list[Event] = field(default_factory=list)
    _free: dict[str, float] = field(default_factory=dict)
    _busy: list[tuple[float, float, str]] = field(default_factory=list)

    def communicate(self, axis: str, seconds: float, ready: float, name: str) -> float:
        """Appends a collective to the stream of an axis. Returns when it ends.

        Args:
            ready: when its input exists; collectives of one axis run one after another.
        """
        if seconds <= 0:
            return ready
        start = max(ready, self._free.get(axis, 0.0))
        end = start + seconds
        self._free[axis] = end
        self._busy.append((start, end, axis))
        self.events.append(Event(axis, name, start, end))
        return end

    def wait(self, until: float, axis: str) -> None:
        """Makes the computation wait, and counts the time for an axis."""
        if until > self.now:
            self.parts[axis] += until - self.now
            self.now = until

    def compute(self, kind: str, seconds: float, name: str) -> None:
        """Appends computation, which is slower while collectives run; the loss counts for their axis."""
        if seconds <= 0:
            return
        start, left = self.now, seconds
        self._busy = [span for span in self._busy if span[1] > start]
        end = start
        for begins, ends, axis in sorted(self._busy):
            if ends <= end or not self.slowdown:
                continue
            alone = min(left, max(0.0, begins - end))
            end, left = end + alone, left - alone
            if left <= 0 or end < begins:
                break
            beside = min(left, (ends - end) / (1 + self.slowdown))
            self.parts[axis] += beside * self.slowdown
            end, left = end + beside * (1 + self.slowdown), left - beside
        self.now = end + left
        self.parts[kind] += seconds
        self.events.append(Event("compute", name, start, self.now))

    def serial(self, axis: str, seconds: float, name: str) -> None:
        """Appends a collective for which the computation waits at once, such as those of `tp`."""
        if seconds > 0:
            self.events.append(Event(axis, name, self.now, self.now + seconds))
            self.parts[axis] += seconds
            self.now += seconds

    def drain(self) -> None:
        """Waits for all collectives, first for those that end first."""
        for axis, end in sorted(self._free.items(), key=lambda item: item[1]):
            self.wait(end, axis)

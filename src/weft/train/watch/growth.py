"""Defines `Growth`, which finds memory that grows steadily."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

SAMPLES = 20


class Growth:
    """Finds memory that grows so steadily that it is used up before the end of a run.

    It looks at the last `SAMPLES` measurements. Memory grows steadily if most measurements exceed the one before, and
    if the second half grows at least half as fast as the first: caches that fill up grow ever more slowly.
    """

    def __init__(self) -> None:
        self.measured: deque[tuple[int, float]] = deque(maxlen=SAMPLES)

    def add(self, step: int, used: float, free: float, steps_left: float) -> float | None:
        """Adds a measurement after `step` steps.

        Args:
            used: bytes of the process.
            free: bytes that it can still get.
            steps_left: number of steps until the end of the run.

        Returns:
            The growth in bytes per step, if the free bytes do not last until the end of the run; otherwise None.
        """
        self.measured.append((step, used))
        if len(self.measured) < SAMPLES:
            return None
        points = list(self.measured)
        first, second = (_slope(half) for half in (points[: SAMPLES // 2], points[SAMPLES // 2 :]))
        growth = min(second, _slope(points))
        rises = sum(later > before for (_, before), (_, later) in pairwise(points))
        steady = first > 0 and second >= first / 2 and rises >= 0.6 * SAMPLES
        if not steady or growth * steps_left <= free:
            return None
        return growth


def _slope(points: list[tuple[int, float]]) -> float:
    """Returns the slope of the line through points with the least squares of deviations."""
    x = sum(step for step, _ in points) / len(points)
    y = sum(used for _, used in points) / len(points)
    return sum((step - x) * (used - y) for step, used in points) / sum((step - x) ** 2 for step, _ in points)

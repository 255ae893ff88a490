"""Defines `Guard`, which judges each step's loss and gradient norm, and knows which data a run skips."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from weft.config.watch import WatchSection

LEAST_DEVIATION = 0.01  # of the median: a nearly constant loss would otherwise have a spike at each small change


@dataclass(frozen=True)
class Finding:
    """A step whose loss or gradient norm is not as usual.

    Attributes:
        kind: "non-finite", "spike" or "corruption".
        action: "warn", "skip", "rollback" or "stop".
        text: what was found, without the step.
        values: the values for the event.
        late: number of updates since the step, including its own: 0, unless `training.sync_every` is above 1.
    """

    kind: str
    action: str
    text: str
    values: dict[str, Any] = field(default_factory=dict)
    late: int = 0

    @property
    def updates(self) -> bool:
        """Whether the update is made in spite of the finding."""
        return self.action == "warn"

    @property
    def ends_step(self) -> bool:
        """Whether the step does not count: the run stops, or returns to a checkpoint."""
        return self.action in ("stop", "rollback")


class Recent:
    """The last `window` values of a number, in the order of time and sorted. All are finite.

    A step costs one search in the sorted list, in place of a sort.
    """

    def __init__(self, window: int, values: Iterable[float] = ()):
        self.values: deque[float] = deque(values, maxlen=window)
        self._sorted = sorted(self.values)

    def add(self, value: float) -> None:
        """Adds a value, in place of the oldest one if there are `window` values."""
        if len(self.values) == self.values.maxlen:
            del self._sorted[bisect_left(self._sorted, self.values[0])]
        self.values.append(value)
        insort(self._sorted, value)

    @property
    def median(self) -> float:
        """The median of the values."""
        middle = len(self._sorted) // 2
        return self._sorted[middle] if len(self._sorted) % 2 else (self._sorted[middle - 1] + self._sorted[middle]) / 2

    def is_spike(self, value: float, factor: float) -> bool:
        """Returns whether `value` exceeds the median by more than `factor` deviations.

        A deviation is 1.4826 times the median absolute deviation, which estimates the standard deviation of normally
        distributed values although some of them are spikes; it is at least `LEAST_DEVIATION` of the median.
        """
        usual = self.median
        excess = value - usual
        if excess <= factor * LEAST_DEVIATION * abs(usual):
            return False  # nearly all steps end here, before the slower part
        return excess > factor * 1.4826 * median(abs(one - usual) for one in self._sorted)


class Guard:
    """Compares each step's loss and gradient norm with those of the last steps.

    Both numbers are equal on all ranks, so all ranks find the same without communication. The values of the last steps
    are part of checkpoints, so a resumed run judges like a run without interruption.

    Args:
        section: the section `watch` of the config.
        saved: the saved state of a checkpoint; the guard's state is below the key `watch`.

    Attributes:
        windows: the windows of data that the run skips: pairs of a step, and the number of steps of data that this step
            and all later steps skip. The steps increase.
        rollbacks: number of rollbacks of the run so far.
    """

    def __init__(self, section: WatchSection, saved: dict[str, Any]):
        state = saved.get("watch") or {}
        self.section, self.spike = section, section.spike
        self.recent = {name: Recent(self.spike.window, state.get(name, ())) for name in ("loss", "grad_norm")}
        self.windows = [(int(step), int(count)) for step, count in state.get("skipped_data", ())]
        self.rollbacks = int(state.get("rollbacks", 0))

    @property
    def may_roll_back(self) -> bool:
        """Whether the config lets the run return to a checkpoint."""
        checks = self.section.parameter_check_every or self.section.replay_every
        return "rollback" in (self.spike.action, self.section.non_finite, checks and self.section.corruption)

    def judge(self, loss: float, norm: float, late: int = 0) -> Finding | None:
        """Returns what is unusual about a step; None if nothing is. Remembers the values.

        Args:
            loss: the loss of the global batch.
            norm: the gradient norm before clipping.
            late: see `Finding`.
        """
        values = {"loss": loss, "grad_norm": norm}
        if not (math.isfinite(loss) and math.isfinite(norm)):
            text = f"the loss ({loss}) or the gradient norm ({norm}) is not finite"
            skipped = {"skipped_data": list(self.windows)} if self.windows else {}  # to repeat the step
            return Finding("non-finite", self.allowed(self.section.non_finite), text, values | skipped, late)
        found = next((name for name, value in values.items() if self._is_spike(name, value)), None)
        finding = None
        if found is not None:
            usual, count = self.recent[found].median, len(self.recent[found].values)
            what = {"loss": "the loss", "grad_norm": "the gradient norm"}[found]
            text = f"{what} is a spike ({values[found]:.5g}; the median of the last {count} steps is {usual:.5g})"
            values_of = {**values, "of": found, "median": usual}
            finding = Finding("spike", self.allowed(self.spike.action), text, values_of, late)
        for name, value in values.items():
            self.recent[name].add(value)
        return finding

    def data_step(self, step: int) -> int:
        """Returns the step whose data the update after `step` updates takes: `step`, and the skipped data before it."""
        return step + sum(count for at, count in self.windows if at <= step)

    def skip_data(self, step: int, until: int) -> None:
        """Makes the update after `step` updates take the data of step `until`, and later updates those that follow.

        Windows after `step` are forgotten: the new one contains them, because a run takes data only forwards.
        """
        self.windows = [window for window in self.windows if window[0] < step]
        self.windows.append((step, until - self.data_step(step)))

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON values."""
        recent = {name: list(kept.values) for name, kept in self.recent.items()}
        return {"watch": {**recent, "skipped_data": self.windows, "rollbacks": self.rollbacks}}

    def allowed(self, action: str) -> str:
        """Returns `action`, or "stop" in place of a rollback after `watch.max_rollbacks` of them."""
        return "stop" if action == "rollback" and self.rollbacks >= self.section.max_rollbacks else action

    def _is_spike(self, name: str, value: float) -> bool:
        recent = self.recent[name]
        return len(recent.values) >= self.spike.window // 2 and recent.is_spike(value, self.spike.factor)

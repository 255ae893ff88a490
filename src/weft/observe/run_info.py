"""What a tracker is told about the run that it follows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunInfo:
    """A run, as trackers see it.

    Attributes:
        path: the run directory; a tracker keeps its own files below it.
        name: the run's name.
        config: the resolved config as plain data (`RunConfig.as_dict()`).
        resumed_step: the updates made before this session; None for a new run. What was tracked of later steps is
            made again.
    """

    path: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    resumed_step: int | None = None


_SPEED = {"tokens_per_second", "mfu", "memory_bytes", "step_seconds", "data_seconds", "warmup_seconds"}


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """A step's numbers under the names that trackers show: train/loss, validation/loss, speed/tokens_per_second, ...

    The step itself, text and missing values are left out; NaN and infinities stay.
    """
    named = {}
    for name, value in metrics.items():
        if name == "step" or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name.startswith("validation_"):
            named["validation/" + name.removeprefix("validation_")] = float(value)
        else:
            named[("speed/" if name in _SPEED else "train/") + name] = float(value)
    return named

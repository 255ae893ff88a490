"""Defines `RunInfo`, the information that a tracker gets about its run, and the names of metrics in trackers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunInfo:
    """The information that a tracker gets about its run.

    Attributes:
        path: the run directory; a tracker writes its files below this directory.
        name: the name of the run.
        config: the resolved config as plain data (`RunConfig.as_dict()`).
        resumed_step: number of updates before this session; None for a new run. If an earlier session already logged
            later steps, this session repeats these steps.
    """

    path: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    resumed_step: int | None = None


_SPEED = {"tokens_per_second", "mfu", "memory_bytes", "step_seconds", "data_seconds", "warmup_seconds"}


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """Returns a step's numbers, by the names that metrics have in trackers: train/loss, validation/loss, speed/mfu, ...

    Omits the step, texts and None, but not NaN and infinities.
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

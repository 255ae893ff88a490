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

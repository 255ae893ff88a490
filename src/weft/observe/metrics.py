"""`metrics.jsonl` of a run directory: what was measured at each step.

A line of metrics has at least `step` (counted from 1: updates done), `tokens` (seen so far), `loss` (nats a token),
`lr`, `grad_norm` (before clipping), `tokens_per_second`, `mfu` (0 to 1), `memory_bytes`, `step_seconds`,
`data_seconds`. With float16 it has the step's `loss_scale` and how many updates were `skipped` so far; where validation
ran, `validation_loss` (nats a token) and `validation_bits_per_byte`. A session's first line has `warmup_seconds`, of
its first step, which may compile: that line's averages include it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.observe.jsonlines import JsonLines, read_lines

METRICS = "metrics.jsonl"


class MetricsFile(JsonLines):
    """Appends to `<run>/metrics.jsonl`; see `JsonLines`. No step stands twice."""

    def __init__(self, run_directory: str | Path):
        super().__init__(Path(run_directory) / METRICS)


def read_metrics(run_directory: str | Path) -> list[dict[str, Any]]:
    """The metrics of a run in the order written; NaN and infinities are floats again. Empty if there are none yet.

    Raises:
        UserError: a broken line that is not the last, as `path:line`.
    """
    return read_lines(Path(run_directory) / METRICS)

"""Which checkpoints of a run are best by a validation metric (`checkpoint.keep_best`).

`checkpoints/best.json` has the metric of each validated step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Literal, NamedTuple

from weft.errors import UserError
from weft.files import read_json, replace_file

RECORD = "best.json"
Mode = Literal["min", "max"]


class Values(NamedTuple):
    """The record of a run.

    Attributes:
        metric: name of the metric; empty if nothing is noted.
        mode: "min" if lower values are better, otherwise "max".
        by_step: step -> value.
    """

    metric: str
    mode: Mode
    by_step: dict[int, float]

    def best(self, saved: Collection[int]) -> list[int]:
        """Returns those of the `saved` steps that have a value, the best first; of equal ones, the earlier."""
        sign = 1.0 if self.mode == "min" else -1.0
        return sorted((step for step in self.by_step if step in saved), key=lambda one: (sign * self.by_step[one], one))


def note_value(folder: Path, step: int, value: float, metric: str, mode: Mode) -> None:
    """Notes the value of a metric after a step.

    Forgets values of later steps, which the run repeats, and those of another metric. A value that is not finite is
    not noted.

    Args:
        folder: the folder `checkpoints` of a run.
        mode: "min" if lower values are better, otherwise "max".

    Raises:
        OSError: the folder cannot be written.
        UserError: the record cannot be read.
    """
    noted = read_values(folder)
    same = (noted.metric, noted.mode) == (metric, mode)
    values = {str(known): one for known, one in noted.by_step.items() if same and known < step}
    if math.isfinite(value):
        values[str(step)] = value
    content = {"metric": metric, "mode": mode, "values": values}
    replace_file(folder / RECORD, json.dumps(content) + "\n")


def read_values(folder: Path) -> Values:
    """Returns the record of a run. Raises UserError if it cannot be read."""
    if not (folder / RECORD).exists():
        return Values("", "min", {})
    record = read_json(folder / RECORD)
    try:
        values = record["values"].items()
        numbers = all(isinstance(one, int | float) and int(step) >= 0 for step, one in values)
        if not numbers or record["mode"] not in ("min", "max") or not isinstance(record["metric"], str):
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError("not a record of validated checkpoints; delete the file", folder / RECORD) from None
    return Values(record["metric"], record["mode"], {int(step): float(one) for step, one in values})

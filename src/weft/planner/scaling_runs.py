"""Reads sizes, tokens and losses of runs for scaling laws, from run directories and CSV files."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from weft.errors import UserError
from weft.observe.manifest import read_manifest
from weft.planner.budget import ParametricLaw
from weft.planner.scaling_law import KEYS, Observation

COLUMNS = ("parameters", "tokens", "loss")
LAST = 20  # the training loss is the mean of the last LAST-th of the steps


def read_observations(paths: Sequence[Path]) -> list[Observation]:
    """Returns the losses of run directories and CSV files.

    Raises:
        UserError: a path is neither, a run is not finished or has no loss, or a line of a file is not valid.
    """
    found: list[Observation] = []
    for path in paths:
        if path.is_dir():
            found.append(read_run(path))
        elif path.is_file():
            found += read_csv(path)
        else:
            raise UserError("does not exist; give a run directory, or a CSV file with parameters,tokens,loss", path)
    return found


def read_law(path: Path) -> ParametricLaw:
    """Returns the law in a file that `weft scaling fit --json` wrote.

    Raises:
        UserError: the file cannot be read, or is not such a file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["parametric"]
        values = {name: float(found[key]["value"]) for key, name in KEYS.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"not a fitted law ({type(error).__name__}: {error})"
        raise UserError(f"{what}; write one: weft scaling fit RUNS... --json > {path.name}", path) from None
    if not all(math.isfinite(value) and value > 0 for value in values.values()):
        raise UserError(
            "the law has numbers that are not positive; fit it again: weft scaling fit RUNS... --json", path
        )
    return ParametricLaw(**values)


def read_run(path: Path) -> Observation:
    """Returns the loss of a finished run: its last validation loss, or the mean training loss of its last steps."""
    manifest = read_manifest(path)
    if "parameters" not in manifest:
        raise UserError("not a run directory (no manifest.json with the number of parameters); give another", path)
    status = (manifest.get("sessions") or [{}])[-1].get("status")
    if status != "finished":
        raise UserError(
            f"this run has not finished (status: {status}), so its loss is not comparable; leave it out", path
        )
    file = path / "metrics.jsonl"
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read ({error}); leave the run out", file) from None
    rows = [row for row in rows if "loss" in row and "tokens" in row]
    if not rows:
        raise UserError("no line has a loss and tokens; leave the run out", file)
    validated = [row["validation_loss"] for row in rows if "validation_loss" in row]
    last = [row["loss"] for row in rows[-max(1, len(rows) // LAST) :]]
    loss = validated[-1] if validated else statistics.mean(last)
    return _checked(file, None, manifest["parameters"], rows[-1]["tokens"], loss)


def read_csv(path: Path) -> list[Observation]:
    """Returns the losses of a CSV file with the columns parameters, tokens and loss; other columns are ignored."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise UserError(
                    f"has no column {', '.join(missing)}; the first line must name {', '.join(COLUMNS)}", path
                )
            return [_checked(path, reader.line_num, *(row[name] for name in COLUMNS)) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot be read as CSV in UTF-8 ({error}); save it again, or name another", path) from None


def _checked(path: Path, line: int | None, *values: object) -> Observation:
    numbers = []
    for name, value in zip(COLUMNS, values, strict=True):
        try:
            number = float(str(value))
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and number > 0):
            raise UserError(
                f"{name}: must be a positive number, not {value!r}; correct it, or leave it out", path, line
            )
        numbers.append(number)
    return Observation(*numbers)

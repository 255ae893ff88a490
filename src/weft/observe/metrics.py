"""`metrics.jsonl` and `samples.jsonl` of a run directory: files of one JSON object a line that survive kill -9.

A line of metrics has at least `step` (counted from 1: updates done), `tokens` (seen so far), `loss` (nats a token),
`lr`, `grad_norm` (before clipping), `tokens_per_second`, `mfu` (0 to 1), `memory_bytes`, `step_seconds`,
`data_seconds`. With float16 it has the step's `loss_scale` and how many updates were `skipped` so far; where validation
ran, `validation_loss` (nats a token) and `validation_bits_per_byte`. A session's first line has `warmup_seconds`, of
its first step, which may compile: that line's averages include it.
A line of samples: `{"step": 200, "prompt": "def ", "text": "main():"}`, one for each prompt.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.files import replace_file

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
# What Weft itself may write; custom metrics have other names, none of which begins with `validation_`.
NAMES = frozenset(
    (
        *("step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "mfu", "memory_bytes", "step_seconds"),
        *("data_seconds", "warmup_seconds", "learned_tokens", "expert_load", "dropped", "loss_scale", "skipped"),
        "nonfinite",
    )
)
NONFINITE = (
    "nonfinite"  # the key beside which numbers JSON cannot say are noted: {"loss": null, "nonfinite": {"loss": "nan"}}
)


def encode(record: dict[str, Any]) -> bytes:
    """One line, with its newline. Floats in full precision (their shortest exact `repr`); NaN and infinities as null
    with a note under "nonfinite", so that the line is JSON for every reader."""
    plain: dict[str, Any] = {}
    nonfinite: dict[str, str] = {}
    for key, value in record.items():
        if hasattr(value, "item"):  # a scalar of torch or numpy
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[key] = str(value)
            value = None
        plain[key] = value
    if nonfinite:
        plain[NONFINITE] = nonfinite
    return json.dumps(plain, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass") + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The object of one line with its NaN and infinities put back; None if it is not a whole object with a step."""
    try:
        record = json.loads(line.decode("utf-8", "surrogatepass"))
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    notes = record.pop(NONFINITE, None)
    if isinstance(notes, dict):
        record.update({key: float(value) for key, value in notes.items() if value in ("nan", "inf", "-inf")})
    return record


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All objects of a file; none if there is no file.

    Only the last line may be torn (a process killed, or not yet done, while writing it): it is left out.

    Raises:
        UserError: a broken line anywhere else, or a file that cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", path) from error
    lines = content.rstrip(b"\n").split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        record = decode(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):  # only the last one can be torn: this one was damaged later
            raise UserError("not a JSON object with a step; mend or remove this line", path, number)
    return records


class JsonLines:
    """Appends records that have a "step", flushed to the operating system line by line, so that a killed process loses
    at most the line being written. A torn last line is dropped when the file is opened.

    Args:
        once: whether a step may stand only once.

    Attributes:
        last: the last step in the file; None if it has no line.

    Raises:
        UserError: the disk is full or the file cannot be written; what was written before stays readable.
    """

    def __init__(self, path: str | Path, *, once: bool = True):
        self.path, self.once = Path(path), once
        self._open(read_lines(self.path))

    def _open(self, records: list[dict[str, Any]]) -> None:
        content = b"".join(encode(record) for record in records)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self.path.exists() or self.path.read_bytes() != content:
                replace_file(self.path, content)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from error
        self.last = max((record["step"] for record in records), default=None)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record. Scalars of torch and numpy are taken for the numbers that they are.

        Raises:
            ValueError: a step that is not later than the last one written (call `keep_until` when going back).
            UserError: see the class.
        """
        step = int(record["step"])
        if self.last is not None and (step <= self.last if self.once else step < self.last):
            raise ValueError(f"step {step} after step {self.last} in {self.path}; call keep_until first when resuming")
        line = encode(record)
        try:
            while line:  # an unbuffered write may take only a part
                line = line[self._file.write(line) :]
        except OSError as error:
            raise self._unwritable(error) from error
        self.last = step

    def keep_until(self, step: int) -> None:
        """Drop the records of later steps: a resumed run writes them again. Atomic (temporary, fsync, rename)."""
        self._file.close()
        self._open([record for record in read_lines(self.path) if record["step"] <= step])

    def close(self) -> None:
        """Write no more. Safe to call twice."""
        self._file.close()

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"cannot be written: {error.strerror}; mend that and run the same command to go on", self.path)


class MetricsFile(JsonLines):
    """Appends to `<run>/metrics.jsonl`; see `JsonLines`. No step stands twice."""

    def __init__(self, run_directory: str | Path):
        super().__init__(Path(run_directory) / METRICS)


class SamplesFile(JsonLines):
    """Appends to `<run>/samples.jsonl` what the model wrote while it learned; see `JsonLines`."""

    def __init__(self, run_directory: str | Path):
        super().__init__(Path(run_directory) / SAMPLES, once=False)

    def add(self, step: int, prompt: str, text: str) -> None:
        """Append what the model made of one prompt after `step` updates; `text` is without the prompt."""
        self.write({"step": step, "prompt": prompt, "text": text})


def read_metrics(run_directory: str | Path) -> list[dict[str, Any]]:
    """The metrics of a run in the order written; NaN and infinities are floats again. Empty if there are none yet.

    Raises:
        UserError: a broken line that is not the last, as `path:line`.
    """
    return read_lines(Path(run_directory) / METRICS)


def read_samples(run_directory: str | Path) -> list[dict[str, Any]]:
    """The samples of a run, as `read_metrics`."""
    return read_lines(Path(run_directory) / SAMPLES)

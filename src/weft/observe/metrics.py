"""Reads and writes `metrics.jsonl` and `samples.jsonl` of a run, which stay valid after kill -9.

Each file has one JSON object per line.

A line of metrics has at least `step` (updates made, from 1), `tokens` (seen so far), `loss` (of `pretrain`
and `sft`: nats per token), `lr`,
`grad_norm` (before clipping), `tokens_per_second`, `mfu` (0 to 1), `memory_bytes`, `step_seconds` and `data_seconds`.
With float16, it also has the `loss_scale` of the step and the number of `skipped` updates so far. After a validation,
it has `validation_loss` (in the unit of `loss`) and `validation_bits_per_byte`. The first line of a session has
`warmup_seconds`, the time of its first step, which may compile; the averages of that line include this step.

A line of samples has the text generated after one prompt: `{"step": 200, "prompt": "def ", "text": "main():"}`.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.files import replace_file, report_write_errors

log = logging.getLogger("weft")

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
# JSON has no NaN and no infinities; they are written as {"loss": null, "nonfinite": {"loss": "nan"}}
NONFINITE = "nonfinite"
# Built-in metrics that differ between equal runs.
OF_MACHINE = ("tokens_per_second", "mfu", "memory_bytes", "step_seconds", "data_seconds", "warmup_seconds")
# The names of built-in metrics; custom metrics must have other names, which do not begin with `validation_`.
NAMES = frozenset(
    (
        *("step", "tokens", "loss", "lr", "grad_norm", *OF_MACHINE),
        *("learned_tokens", "expert_load", "dropped", "loss_scale", "skipped"),
        NONFINITE,
    )
)


def as_number(value: Any) -> Any:
    """Returns the number of a scalar of torch or numpy; other values unchanged."""
    return value.item() if hasattr(value, "item") else value


def encode(record: dict[str, Any]) -> bytes:
    """Returns a record as a line of JSON, including the newline. Floats have full precision.

    NaN and infinities are written as null. The line then has the key "nonfinite", which maps the keys of these values
    to "nan", "inf" or "-inf".
    """
    plain: dict[str, Any] = {}
    nonfinite: dict[str, str] = {}
    for key, value in record.items():
        value = as_number(value)
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[key] = str(value)
            value = None
        plain[key] = value
    if nonfinite:
        plain[NONFINITE] = nonfinite
    return json.dumps(plain, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass") + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """Parses a line that `encode` returned, and restores NaN and infinities.

    Returns None if the line is not a JSON object with an integer `step`.
    """
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
    """Returns the records of a file; an empty list if the file does not exist.

    An incomplete last line is left out: the process that wrote it was killed, or is still writing.

    Raises:
        UserError: another line is invalid, or the file cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}; check its permissions", path) from error
    lines = content.rstrip(b"\n").split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        record = decode(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise UserError("not a JSON object with a step; correct or remove this line", path, number)
    return records


class JsonLines:
    """A file of JSON records with a `step`, opened for appending.

    Each line is flushed, so a killed process loses at most one line. An incomplete last line is removed when the file
    is opened.

    Args:
        once: whether each step has at most one record.

    Attributes:
        last: the last step in the file; None if the file is empty.

    Raises:
        UserError: the disk is full, or the file cannot be written; earlier lines stay readable.
    """

    def __init__(self, path: str | Path, *, once: bool = True):
        self.path, self.once = Path(path), once
        self._open(read_lines(self.path))

    def _writing(self):
        return report_write_errors(self.path, "correct the cause, then run the same command to resume")

    def _open(self, records: list[dict[str, Any]]) -> None:
        content = b"".join(encode(record) for record in records)
        with self._writing():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self.path.exists() or self.path.read_bytes() != content:
                replace_file(self.path, content)
            self._file = self.path.open("ab", buffering=0)
        self.last = max((record["step"] for record in records), default=None)

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record; scalars of torch and numpy are converted to numbers.

        Raises:
            ValueError: the record's step is less than the last step in the file, or equal to the last step although
                `once` is true. Call `keep_until` first.
            UserError: the disk is full, or the file cannot be written.
        """
        step = int(record["step"])
        if self.last is not None and (step <= self.last if self.once else step < self.last):
            raise ValueError(
                f"{self.path}: step {step} cannot follow step {self.last}; call keep_until first when resuming"
            )
        line = encode(record)
        with self._writing():
            while line:  # an unbuffered write may be partial
                line = line[self._file.write(line) :]
        self.last = step

    def keep_until(self, step: int) -> None:
        """Moves the records after `step`, which a resumed run repeats, to the log. The removal is atomic."""
        self._file.close()
        records = read_lines(self.path)
        for record in records:
            if record["step"] > step:
                log.info("removed from %s: %s", self.path.name, json.dumps(record))
        self._open([record for record in records if record["step"] <= step])

    def close(self) -> None:
        """Closes the file. Can be called twice."""
        self._file.close()


class MetricsFile(JsonLines):
    """The file `<run>/metrics.jsonl`, opened for appending."""

    def __init__(self, run_directory: str | Path):
        super().__init__(Path(run_directory) / METRICS)


class SamplesFile(JsonLines):
    """The file `<run>/samples.jsonl`, opened for appending."""

    def __init__(self, run_directory: str | Path):
        super().__init__(Path(run_directory) / SAMPLES, once=False)

    def add(self, step: int, prompt: str, text: str) -> None:
        """Appends a prompt and the text that the model generated after the prompt."""
        self.write({"step": step, "prompt": prompt, "text": text})


def read_metrics(run_directory: str | Path) -> list[dict[str, Any]]:
    """Returns the metrics of a run in the order written; an empty list without metrics. Raises as `read_lines`."""
    return read_lines(Path(run_directory) / METRICS)


def read_samples(run_directory: str | Path) -> list[dict[str, Any]]:
    """Returns the samples of a run in the order written; an empty list without samples. Raises as `read_lines`."""
    return read_lines(Path(run_directory) / SAMPLES)

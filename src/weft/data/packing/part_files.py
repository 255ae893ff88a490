"""A part of a pack: units that one worker encodes into files of its own; they are whole once its `.json` is there."""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from weft.data.documents import Counts
from weft.data.sources import Reading, Unit, read
from weft.data.sources.source_format import source_format

PART_UNITS = 256


@dataclass(frozen=True)
class Part:
    """Consecutive units that one worker does at once; `key` changes when what they are read from does."""

    index: int
    units: tuple[Unit, ...]
    key: str

    @property
    def size(self) -> int:
        """Raw bytes."""
        return sum(unit.size for unit in self.units)

    def __str__(self) -> str:
        first, last = self.units[0], self.units[-1]
        if len(self.units) > 1:
            return f"{first.path} and the {len(self.units) - 1:,} after it"
        if first.stop is None:
            return first.path
        return f"{first.path} ({source_format(first.format).positions} {last.start:,} to {last.stop:,})"


@dataclass(frozen=True)
class Job:
    """What all parts of a pack have in common.

    Attributes:
        folder: where parts are written.
        fail: stop at the first reject.
        threads: of each worker's tokenizer.
    """

    folder: str
    reading: Reading
    fail: bool
    threads: int = 1


class Stop(Exception):
    """A document ends the pack.

    Args:
        unit: its place in the part.
        line: within that unit; None where the file is one document.
        before: lines of the same file in earlier units of the part.
        what: the reason, and what to do about it.
    """

    def __init__(self, unit: int, line: int | None, before: int, what: str):
        self.unit, self.line, self.before, self.what = unit, line, before, what
        super().__init__(unit, line, before, what)


class Unwritable(Exception):
    """A part cannot be written. Args: the system's words."""


class Plan:
    """A pack's units, in parts.

    Args:
        units: of all the input.
        part_bytes: about how many raw bytes one part is.
        shard: (i, n): the i-th share of n, counted from 1. Shares are about equal in bytes, and depend on the units
            alone.

    Attributes:
        units: of the share.
        before: of other shares, the units of the file that this share begins in.
        cut: whether the share begins within a file, and whether it ends within one.
        size: raw bytes.
    """

    def __init__(self, units: Sequence[Unit], part_bytes: int, shard: tuple[int, int] | None = None):
        first, last = (0, len(units)) if shard is None else _share(units, *shard)
        self.units = units[first:last]
        self.size = sum(unit.size for unit in self.units)
        path = self.units[0].path if self.units else None
        self.before = [unit for unit in units[:first] if unit.path == path]
        ends = [unit for unit in units[last : last + 1] if self.units and unit.path == self.units[-1].path]
        self.cut = (bool(self.before), bool(ends))
        self._borders, size = [0], 0
        for number, unit in enumerate(self.units):
            if number > self._borders[-1] and (
                size + unit.size > part_bytes or number - self._borders[-1] == PART_UNITS
            ):
                self._borders.append(number)
                size = 0
            size += unit.size
        if self.units:
            self._borders.append(len(self.units))

    def lines_before(self, reading: Reading) -> int:
        """Lines of the share's first file that lie in other shares; those are read."""
        lines = 0
        for unit in self.before:
            counts = Counts()
            for _ in read(unit, reading, counts):
                pass
            lines += counts.lines
        return lines

    def __len__(self) -> int:
        return len(self._borders) - 1

    def part(self, index: int) -> Part:
        """One part, as its files are now."""
        units = tuple(self.units[self._borders[index] : self._borders[index + 1]])
        facts = [[u.path, u.kind, u.start, u.stop, u.size, *_state(u.path)] for u in units]
        return Part(index, units, hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32])


def _state(path: str) -> tuple[int, int]:
    """A file's size and the time of its last change, in nanoseconds."""
    try:
        status = os.stat(path)
    except OSError:  # the standard input; or a file that reading will be a reject of
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _share(units: Sequence[Unit], i: int, n: int) -> tuple[int, int]:
    """The first unit of a share, and the first one behind it: a unit belongs where its first byte lies."""
    total = sum(unit.size for unit in units)
    starts = list(accumulate((unit.size for unit in units), initial=0))[:-1]
    return (
        bisect_left(starts, -(-total * (i - 1) // n)) if i > 1 else 0,
        (bisect_left(starts, -(-total * i // n)) if i < n else len(units)),
    )


def part_file(folder: str | Path, index: int, what: str) -> str:
    """The path of one of a part's files."""
    return f"{folder}/{index:08d}.{what}"


def finished(folder: str | Path, part: Part) -> dict[str, Any] | None:
    """What a finished part's `.json` says; None if it is not finished, or was made of something else."""
    try:
        with open(part_file(folder, part.index, "json"), encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError):
        return None
    return content if content["key"] == part.key else None


def remove(folder: str | Path, index: int) -> None:
    """Delete a part's files, the one that makes them whole first."""
    for what in ("json", "tokens", "lengths", "mask", "rejects"):
        Path(part_file(folder, index, what)).unlink(missing_ok=True)

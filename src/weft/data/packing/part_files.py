"""Defines the parts of a pack: groups of consecutive units. A worker encodes each part into separate files.

The files of a part are complete when its `.json` file exists.
"""

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
from weft.data.packing.encoder import Encoder
from weft.data.sources import Reading, Unit, read
from weft.data.sources.source_format import source_format
from weft.data.stores.field_files import field_file

PART_UNITS = 256


@dataclass(frozen=True)
class Part:
    """Consecutive units (files or ranges of files) that one worker encodes.

    `key`: a digest that changes when one of the files changes.
    """

    index: int
    units: tuple[Unit, ...]
    key: str

    @property
    def size(self) -> int:
        """The number of raw bytes of the units."""
        return sum(unit.size for unit in self.units)

    def __str__(self) -> str:
        first, last = self.units[0], self.units[-1]
        if len(self.units) > 1:
            return f"{first.path} and the next {len(self.units) - 1:,} files or ranges of files"
        if first.stop is None:
            return first.path
        return f"{first.path} ({source_format(first.format).positions} {last.start:,} to {last.stop:,})"


@dataclass(frozen=True)
class Job:
    """The settings for encoding the parts of a pack.

    Attributes:
        folder: folder in which the files of the parts are written.
        reading: how documents are extracted from the input files.
        fail: whether to stop at the first rejected document.
        threads: number of threads of each worker's tokenizer.
    """

    folder: str
    reading: Reading
    fail: bool
    threads: int = 1


class DocumentFailure(Exception):
    """Raised for a document that stops the pack.

    Args:
        unit: position of the document's unit in the part.
        line: line of the document in the unit; None if the document is a complete file.
        before: number of lines of the same file in earlier units of the part.
        what: the error message: why the document was rejected, and what to do.
    """

    def __init__(self, unit: int, line: int | None, before: int, what: str):
        self.unit, self.line, self.before, self.what = unit, line, before, what
        super().__init__(unit, line, before, what)


class WriteFailure(Exception):
    """Raised if a part cannot be written. The argument is the message of the operating system."""


class Plan:
    """Groups a pack's units into parts.

    Args:
        units: units of all inputs.
        part_bytes: approximate number of raw bytes of a part.
        shard: (i, n): use only shard i of n, counted from 1; None: all units. Shards have about equal numbers of bytes,
            and their borders depend only on the units.

    Attributes:
        units: units of the shard.
        before: the units of this shard's first file that belong to earlier shards.
        split: whether the first file of the shard begins in an earlier shard, and whether the last file ends in a later
            shard.
        size: number of raw bytes of the units.
    """

    def __init__(self, units: Sequence[Unit], part_bytes: int, shard: tuple[int, int] | None = None):
        first, last = (0, len(units)) if shard is None else _share(units, *shard)
        self.units = units[first:last]
        self.size = sum(unit.size for unit in self.units)
        path = self.units[0].path if self.units else None
        self.before = [unit for unit in units[:first] if unit.path == path]
        after = [unit for unit in units[last : last + 1] if self.units and unit.path == self.units[-1].path]
        self.split = (bool(self.before), bool(after))
        self._borders, size = [0], 0
        for number, unit in enumerate(self.units):
            length = number - self._borders[-1]
            if length and (size + unit.size > part_bytes or length == PART_UNITS):
                self._borders.append(number)
                size = 0
            size += unit.size
        if self.units:
            self._borders.append(len(self.units))

    def lines_before(self, reading: Reading) -> int:
        """Counts the lines of the shard's first file that belong to earlier shards, by reading them."""
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
        """Returns the part at position `index`. Its key is computed from the current state of the input files."""
        units = tuple(self.units[self._borders[index] : self._borders[index + 1]])
        facts = [
            [u.path, f"{u.format}.{u.compression}".rstrip("."), u.start, u.stop, u.size, *_file_state(u.path)]
            for u in units
        ]
        return Part(index, units, hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32])


def _file_state(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:  # the standard input, or a file that will be rejected
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _share(units: Sequence[Unit], i: int, n: int) -> tuple[int, int]:
    """Returns the units in shard `i` of `n`, counted from 1, as the range [start, stop) of their indices.

    A unit belongs to the shard that contains the unit's first byte.
    """
    total = sum(unit.size for unit in units)
    starts = list(accumulate((unit.size for unit in units), initial=0))[:-1]
    return (
        bisect_left(starts, -(-total * (i - 1) // n)) if i > 1 else 0,
        bisect_left(starts, -(-total * i // n)) if i < n else len(units),
    )


def part_path(folder: str | Path, index: int, what: str) -> str:
    return f"{folder}/{index:08d}.{what}"


def files_of(encoder: Encoder) -> list[str]:
    """Returns what the files of a part contain, as for `part_path`."""
    return ["tokens", "lengths", *["mask"] * encoder.has_mask, *map(field_file, encoder.fields)]


def read_finished(folder: str | Path, part: Part) -> dict[str, Any] | None:
    """Returns the content of a part's `.json` file; None if the part is not finished or its inputs have changed."""
    try:
        with open(part_path(folder, part.index, "json"), encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError):
        return None
    return content if content["key"] == part.key else None


def remove_part(folder: str | Path, index: int) -> None:
    """Deletes a part's files, the `.json` file first."""
    Path(part_path(folder, index, "json")).unlink(missing_ok=True)
    for path in Path(folder).glob(f"{index:08d}.*"):
        path.unlink(missing_ok=True)

"""What a file is, by its name, and the units that one worker reads at once."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from weft.config.errors import UserError
from weft.data.sources.find import STANDARD_INPUT
from weft.data.sources.reading import Reading, Unit

RANGE_BYTES = 64 << 20
COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
# Every other file is text.
SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jl": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}


def kind_of(path: Path, forced: str | None = None) -> str:
    """The format by the file's name, or the forced one; its compression, by the name, behind a dot."""
    name = path.name.lower()
    stem, suffix = os.path.splitext(name)
    packed = COMPRESSIONS.get(suffix)
    form = forced or SUFFIXES.get(os.path.splitext(stem)[1] if packed else suffix, "text")
    return f"{form}.{packed}" if packed else form


def plan(files: Sequence[Path], reading: Reading, range_bytes: int = RANGE_BYTES) -> list[Unit]:
    """The units of `files`, in order; the same for the same files, and cheap: sizes and Parquet's footers are read.

    Args:
        range_bytes: about how many bytes of JSON lines or Parquet one unit is.

    Raises:
        UserError: a file cannot be read.
    """
    units: list[Unit] = []
    for path in files:
        kind = kind_of(path, reading.format)
        if path == STANDARD_INPUT:
            units.append(Unit("-", kind, 0, None, 0))
            continue
        try:
            status = os.stat(path)
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}", path) from None
        whole = Unit(str(path), kind, 0, None, status.st_size)
        if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
            units.append(whole)
            continue
        cut = CUTS.get(kind)
        units += cut(whole, range_bytes) if cut else [whole]
    return units


def _cut_lines(whole: Unit, range_bytes: int) -> list[Unit]:
    starts = range(0, whole.size, range_bytes)
    ends = [min(start + range_bytes, whole.size) for start in starts]
    return [Unit(whole.path, "jsonl", a, b, b - a) for a, b in zip(starts, ends, strict=True)]


def _cut_json(whole: Unit, range_bytes: int) -> list[Unit]:
    """Many `.json` files hold JSON lines: those are cut like them."""
    from weft.data.sources.json_list import holds_lines

    return _cut_lines(whole, range_bytes) if holds_lines(whole.path) else [whole]


def _cut_parquet(whole: Unit, range_bytes: int) -> list[Unit]:
    from weft.data.sources.columns import cut_parquet

    return cut_parquet(whole, range_bytes)


CUTS: dict[str, Callable[[Unit, int], list[Unit]]] = {
    "jsonl": _cut_lines,
    "json": _cut_json,
    "parquet": _cut_parquet,
}

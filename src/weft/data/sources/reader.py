"""Splits files into units, and reads each unit as a stream of documents and rejected documents."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from weft.data.documents import Counts, Document, Reject
from weft.data.sources.find import STANDARD_INPUT
from weft.data.sources.read_options import Reading, Unit
from weft.data.sources.source_format import Tally, detect_format, format_errors, source_format
from weft.data.sources.streams import Broken, UnitReader

RANGE_BYTES = 64 << 20


def plan(files: Sequence[Path], reading: Reading, range_bytes: int = RANGE_BYTES) -> list[Unit]:
    """Splits files into units, in order and deterministically.

    For built-in formats, reads only file sizes, Parquet footers, and the first MiB of large `.json` files.

    Args:
        range_bytes: approximate number of bytes of a unit, for formats that can be split.
    """
    units: list[Unit] = []
    for path in files:
        unit = Unit(str(path), *detect_format(path, reading.format))
        try:
            status = os.stat(path) if path != STANDARD_INPUT else None
        except OSError:  # reading the file reports the error
            status = None
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_size == 0:
            units.append(unit)
            continue
        unit = replace(unit, size=status.st_size)
        form = source_format(unit.format)
        with format_errors(type(form), unit.path):
            units += [unit] if unit.compression else form.cut(unit, range_bytes)
    return units


def read(
    unit: Unit, reading: Reading, counts: Counts, on_bytes: Callable[[int], None] = lambda n: None
) -> Iterator[Document | Reject]:
    """Yields the documents and rejected documents of a unit in order, with bounded memory.

    Broken content yields a Reject and raises no exception. If the file, or the rest of the file, cannot be read, the
    last item is a Reject whose `line` is None.

    Args:
        counts: a new `Counts`, which is complete when all items have been yielded.
        on_bytes: called with the number of bytes that were read from disk since the last call.

    Raises:
        UserError: the size of the file has changed, the format does not support the compression or a pipe, or a custom
            format raised an exception.
    """
    tally, form = Tally(counts), source_format(unit.format)
    try:
        with UnitReader(unit, counts, on_bytes) as file, format_errors(type(form), unit.path):
            yield from form.read(file, reading, tally)
    except Broken as error:
        yield tally.reject(None, error.reason, error.hint)


def read_all(
    files: Sequence[Path],
    reading: Reading,
    counts: Counts,
    *,
    on_reject: Callable[[Path, Reject], None] = lambda path, reject: None,
    on_skip: Callable[[Path, str], None] = lambda path, reason: None,
    on_bytes: Callable[[int], None] = lambda more: None,
) -> Iterator[Document]:
    """Yields the documents of all files. `Document.line` is the line number in the file.

    Args:
        counts: the counts of each file are added to it after the file has been read.
        on_reject: called with the path and each rejected document, whose `line` is the line number in the file. An
            exception that it raises stops the reading.
        on_skip: called with the path of each file that contains no text, and the reason.
        on_bytes: called with the number of bytes that were read from disk since the last call.
    """
    for path, units in groupby(plan(files, reading), key=lambda unit: unit.path):
        file = Counts()
        for unit in units:
            unit_counts = Counts()
            for item in read(unit, reading, unit_counts, on_bytes):
                if file.lines and item.line is not None:
                    item = item._replace(line=item.line + file.lines)
                if isinstance(item, Reject):
                    on_reject(Path(path), item)
                else:
                    yield item
            file.add(unit_counts)
        for reason in file.skipped_files:
            on_skip(Path(path), reason)
        counts.add(file)

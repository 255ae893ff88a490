"""Files as units of work, and each unit as a stream of documents and rejects, whatever its format."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from weft.data.documents import Counts, Document, Reject
from weft.data.sources.find import STANDARD_INPUT
from weft.data.sources.read_options import Reading, Unit
from weft.data.sources.source_format import Tally, kind_of, source_format, users_code
from weft.data.sources.streams import Broken, Raw

RANGE_BYTES = 64 << 20


def plan(files: Sequence[Path], reading: Reading, range_bytes: int = RANGE_BYTES) -> list[Unit]:
    """The units of `files`, in order; the same for the same files, and cheap: sizes and Parquet's footers are read.

    Args:
        range_bytes: about how many bytes of a file that can be cut one unit is.
    """
    units: list[Unit] = []
    for path in files:
        whole = Unit(str(path), kind_of(path, reading.format), 0, None, 0)
        try:
            status = os.stat(path) if path != STANDARD_INPUT else None
        except OSError:  # reading it will say what is wrong
            status = None
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_size == 0:
            units.append(whole)
            continue
        whole = whole.part(0, None, status.st_size)
        form = source_format(whole.format)
        with users_code(type(form), whole.path):
            units += [whole] if whole.packed else form.cut(whole, range_bytes)
    return units


def read(
    unit: Unit, reading: Reading, counts: Counts, on_bytes: Callable[[int], None] = lambda n: None
) -> Iterator[Document | Reject]:
    """The documents of one unit in order, streamed with bounded memory, and its rejects in their places.

    What is broken in the file is a Reject, never an exception; where the file or the rest of it cannot be read, the
    last item is a Reject without a line.

    Args:
        counts: fresh; it is whole when the stream has ended.
        on_bytes: is told how many more bytes on disk have been read.

    Raises:
        UserError: the file is shorter than when it was planned; a format of the user's raised something.
    """
    tally, form = Tally(counts), source_format(unit.format)
    try:
        with Raw(unit, counts, on_bytes) as file, users_code(type(form), unit.path):
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
    on_progress: Callable[[int], None] = lambda done: None,
) -> Iterator[Document]:
    """All documents of `files`, one file after the other; lines are those of the file.

    Args:
        counts: is filled unit by unit.
        on_reject: is told of each reject, with its line in the file; it may raise.
        on_skip: is told of each file that holds no documents at all, and why.
        on_progress: is told how many bytes have been read.
    """
    done = 0

    def on_bytes(more: int) -> None:
        nonlocal done
        done += more
        on_progress(done)

    for path, units in groupby(plan(files, reading), key=lambda unit: unit.path):
        file = Counts()
        for unit in units:
            seen = Counts()
            for item in read(unit, reading, seen, on_bytes):
                if file.lines and item.line is not None:
                    item = item._replace(line=item.line + file.lines)
                if isinstance(item, Reject):
                    on_reject(Path(path), item)
                else:
                    yield item
            file.add(seen)
        for reason in file.skipped_files:
            on_skip(Path(path), reason)
        counts.add(file)

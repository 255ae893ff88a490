"""One unit as a stream of documents and rejects, whatever its kind."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from weft.data.documents import Counts, Document, Reject
from weft.data.sources.kinds import plan
from weft.data.sources.reading import Reading, Unit
from weft.data.sources.streams import Broken, Raw
from weft.data.sources.tally import Tally

# A format's module: `read(raw, reading, tally)` yields documents and rejects, and raises Broken.
READERS = {
    "jsonl": "weft.data.sources.lines",
    "json": "weft.data.sources.json_list",
    "text": "weft.data.sources.text",
    "csv": "weft.data.sources.rows",
    "tsv": "weft.data.sources.rows",
    "parquet": "weft.data.sources.columns",
    "arrow": "weft.data.sources.columns",
}


def read(
    unit: Unit, reading: Reading, counts: Counts, on_bytes: Callable[[int], None] = lambda n: None
) -> Iterator[Document | Reject]:
    """The documents of one unit in order, streamed with bounded memory, and its rejects in their places.

    What is broken in the file is a Reject, never an exception; where the rest of the file cannot be read, the last
    item is a Reject without a line.

    Args:
        counts: fresh; it is whole when the stream has ended.
        on_bytes: is told how many more bytes on disk have been read.

    Raises:
        UserError: the file cannot be opened or read, or is shorter than when it was planned.
    """
    module = import_module(READERS[unit.kind.partition(".")[0]])
    tally = Tally(counts)
    with Raw(unit, counts, on_bytes) as raw:
        try:
            yield from module.read(raw, reading, tally)
        except Broken as error:
            yield tally.reject(None, error.reason, error.hint)


def read_all(
    files: Sequence[Path],
    reading: Reading,
    counts: Counts,
    *,
    on_reject: Callable[[Path, Reject], None] = lambda path, reject: None,
    on_progress: Callable[[int], None] = lambda done: None,
    on_file: Callable[[dict[str, Any]], None] = lambda seen: None,
) -> Iterator[Document]:
    """All documents of `files`, one file after the other; lines are those of the file.

    Args:
        counts: is filled unit by unit.
        on_reject: is told of each reject, with its line in the file; it may raise.
        on_progress: is told how many bytes have been read.
        on_file: is told of each file that has been read: path, size, sha256 (of a file in several units: of their
            digests), documents.
    """
    done = 0

    def on_bytes(more: int) -> None:
        nonlocal done
        done += more
        on_progress(done)

    for path, units in groupby(plan(files, reading), key=lambda unit: unit.path):
        file, digests = Counts(), []
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
            digests.append(seen.sha256)
        counts.add(file)
        digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
        on_file({"path": path, "size": file.raw_bytes, "sha256": digest, "documents": file.documents})

"""What a source format is, and how it is found: by a file's name, or by its own.

A format is one class in one file: of `weft/data/sources/formats/`, of a package (the plugin kind `source`) or of the
user's (`--format module:Class`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from weft import plugins
from weft.data.documents import Counts, Document, Reject
from weft.data.sources import formats
from weft.data.sources.read_options import Reading, Unit
from weft.data.sources.streams import Broken, Raw
from weft.data.sources.values import Take, Unfit, checking, size_of
from weft.errors import UserError, describe_exception, describe_user_exception

COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
NO_MORE = (".txt", ".md", ".html", ".py", "")  # endings of text, for which no package is asked


class Tally:
    """Makes documents and rejects of one unit, and counts each one it makes."""

    def __init__(self, counts: Counts):
        self.counts = counts

    def document(self, value: Any, line: int | None, size: int | None = None) -> Document:
        """A document; `size`, in bytes, spares a record's being written once more to know it."""
        self.counts.documents += 1
        self.counts.empty += value == ""
        self.counts.bytes += size_of(value) if size is None or isinstance(value, str) else size
        return Document(value, line)

    def reject(self, line: int | None, reason: str | Unfit, hint: str = "", last: int | None = None) -> Reject:
        """A reject; `last`: the last line of it, if there are several."""
        if isinstance(reason, Unfit):
            reason, hint = reason.reason, reason.hint
        self.counts.rejected[reason] += 1
        return Reject(line, reason, hint, last=last)

    def take(self, take: Take, record: Any, line: int, size: int | None = None) -> Document | Reject:
        """The document that `take` makes of a record; a reject if the record is an Unfit, or `take` raises one."""
        try:
            if isinstance(record, Unfit):
                raise record
            return self.document(take(record), line, size)
        except Unfit as why:
            return self.reject(line, why)

    def skip_file(self, reason: str) -> None:
        """The file holds no documents at all."""
        self.counts.skipped_files[reason] += 1


class SourceFormat:
    """A format of files that hold documents.

    Attributes:
        suffixes: the endings of files' names by which it is known, in lower case (".jsonl").
        holds: what its documents are, in words; "text" if there is no record, of which --field names a text.
        positions: what `cut` counts `start` and `stop` of a unit in.
        counted: what the `line` of a document or reject counts, in messages: `a.jsonl:2:`, but `a.cards: record 2:`.
    """

    suffixes: tuple[str, ...] = ()
    holds = "records"
    positions = "bytes"
    counted = "line"

    def cut(self, whole: Unit, range_bytes: int) -> list[Unit]:
        """The units, each of about `range_bytes`, that workers read side by side; the same for the same file.

        Args:
            whole: the plain file, which is not empty.
        """
        return [whole]

    def read(self, file: Raw, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
        """The documents of a unit, in order, and the rejects in their places; made by `tally`, which counts them.

        `tally.counts.lines` is set to the number of lines (rows, records) of the unit.

        Raises:
            Broken: (from the iterator) the rest of the file cannot be read.
        """
        raise NotImplementedError


class RecordFormat(SourceFormat):
    """A format that needs `records` only, for files that are read as a whole."""

    counted = "record"

    def records(self, file: Raw) -> Iterator[Any]:
        """The records (dicts) in order, streamed; an Unfit stands in the place of one that cannot be read."""
        raise NotImplementedError

    def read(self, file: Raw, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
        take = checking(reading)
        for line, record in enumerate(self.records(file), start=1):
            tally.counts.lines = line
            yield tally.take(take, record, line)


@cache
def source_format(name: str) -> SourceFormat:
    """The format of this name: a built-in one, a package's, or `module:Class`.

    Raises:
        UserError: there is none, or it cannot be imported.
    """
    try:
        found = plugins.find("source", name, formats, "Format")
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's module does when it is imported
        told = describe_user_exception(error) or describe_exception(error)
        raise UserError(f"{told} (on importing --format {name})") from error
    made = getattr(found, "Format", found)
    if not (isinstance(made, type) and issubclass(made, SourceFormat)):
        raise UserError(f"--format {name}: is not a source format; name a subclass of weft.data.sources.SourceFormat")
    with users_code(made):
        return made()


@contextmanager
def users_code(kind: type[SourceFormat], path: str | None = None) -> Iterator[None]:
    """What a format of the user's raises here becomes a UserError, with the line of the user's file.

    Args:
        path: of the file that it reads.
    """
    try:
        yield
    except (UserError, Broken, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        told = describe_user_exception(error, getattr(sys.modules.get(kind.__module__), "__file__", None))
        if told is None or kind.__module__.startswith(f"{__package__}."):
            raise
        reading = f", reading {path}" if path is not None else ""
        raise UserError(f"{told} (in {kind.__module__}:{kind.__qualname__}{reading})") from error


def mistake_at(what: str, unit: Unit, line: int | None) -> UserError:
    """A mistake at a document, `line` as in Reject: a line of the file, or a record or row by its number."""
    counted = source_format(unit.format).counted
    if line is None or counted == "line":
        return UserError(what, unit.path, line)
    return UserError(f"{counted} {line:,}: {what}", unit.path)


@cache
def _by_suffix(packages: bool) -> dict[str, str]:
    """Suffix -> format, of the built-in ones, or of those of packages."""
    names = plugins.plugins("source") if packages else plugins.built_ins(formats, "Format")
    return {suffix: name for name in reversed(list(names)) for suffix in source_format(name).suffixes}


def kind_of(path: Path, forced: str | None = None) -> str:
    """The format by the file's name, or the forced one; its compression, by the name, behind a dot."""
    stem, suffix = os.path.splitext(path.name.lower())
    packed = COMPRESSIONS.get(suffix)
    if packed:
        suffix = os.path.splitext(stem)[1]
    form = forced or _by_suffix(False).get(suffix)
    if form is None and suffix not in NO_MORE:
        form = _by_suffix(True).get(suffix)
    return (form or "text") + (f".{packed}" if packed else "")


def holdings(files: Sequence[Path], reading: Reading) -> dict[str, str]:
    """The formats of files, and what each holds."""
    names = {kind_of(path, reading.format).removesuffix(".gz").removesuffix(".zst") for path in files}
    return {name: source_format(name).holds for name in sorted(names)}


def cut_lines(whole: Unit, range_bytes: int) -> list[Unit]:
    """Ranges of bytes; a line belongs to the range in which it begins (`Raw.whole_lines`)."""
    starts = range(0, whole.size, range_bytes)
    ends = [min(start + range_bytes, whole.size) for start in starts]
    return [whole.part(start, end, end - start) for start, end in zip(starts, ends, strict=True)]

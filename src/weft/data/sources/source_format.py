"""Defines the interface of source formats, and finds a format by file name or format name.

A format is a class: built in (`weft/data/sources/formats/`), provided by an installed package (the plugin kind
`source`), or custom (`--format module:Class`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from weft import plugins
from weft.data.documents import Counts, Document, Reject
from weft.data.option_names import COMMAND, OptionNames
from weft.data.sources import formats
from weft.data.sources.read_options import Reading, Unit
from weft.data.sources.streams import Broken, UnitReader
from weft.data.sources.values import Extractor, Unfit, make_checked_extractor, utf8_size
from weft.errors import UserError, describe_exception, describe_user_exception

COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
TEXT_SUFFIXES = (".txt", ".md", ".html", ".py", "")  # always read as text, whatever formats the plugins define


class Tally:
    """Creates and counts the documents and rejected documents of one unit (a file, or a range of a file)."""

    def __init__(self, counts: Counts):
        self.counts = counts

    def document(self, value: Any, line: int | None, size: int | None = None) -> Document:
        """Creates and counts a document. `size`: number of bytes of a record; None: the bytes of the record as JSON."""
        self.counts.documents += 1
        self.counts.empty += value == ""
        self.counts.bytes += utf8_size(value) if size is None or isinstance(value, str) else size
        return Document(value, line)

    def reject(self, line: int | None, reason: str | Unfit, hint: str = "", last: int | None = None) -> Reject:
        """Creates and counts a rejected document. `last`: the last line of the document, if it spans several lines."""
        if isinstance(reason, Unfit):
            reason, hint = reason.reason, reason.hint
        self.counts.rejected[reason] += 1
        return Reject(line, reason, hint, last=last)

    def extract(self, extract: Extractor, record: Any, line: int, size: int | None = None) -> Document | Reject:
        """Returns a document with the value `extract(record)`. `line` and `size` are as in `document`.

        If `record` is an Unfit, or if `extract` raises Unfit, returns a Reject.
        """
        try:
            if isinstance(record, Unfit):
                raise record
            return self.document(extract(record), line, size)
        except Unfit as error:
            return self.reject(line, error)

    def skip_file(self, reason: str) -> None:
        """Counts the file as skipped, because it contains no documents."""
        self.counts.skipped_files[reason] += 1


class SourceFormat:
    """The base class of file formats that contain documents.

    Attributes:
        suffixes: file name suffixes of the format, in lower case (".jsonl").
        holds: what files of the format contain, for messages: "records", "rows", or "text" if documents have no fields.
        positions: what `Unit.start` and `Unit.stop` count, for messages: "bytes" or "row groups".
        item: what `Document.line` counts, for messages: "line" (`a.jsonl:2:`), "row", "record" (`a.cards: record 2:`).
    """

    suffixes: tuple[str, ...] = ()
    holds = "records"
    positions = "bytes"
    item = "line"

    def cut(self, unit: Unit, range_bytes: int) -> list[Unit]:
        """Splits an uncompressed, non-empty file into units of about `range_bytes` bytes. Must be deterministic."""
        return [unit]

    def read(self, file: UnitReader, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
        """Yields the documents and rejected documents of a unit, in order.

        An implementation creates them with the methods of `tally`, sets `tally.counts.lines` to the number of lines
        (rows, records), and raises Broken if the rest of the file cannot be read.
        """
        raise NotImplementedError


class RecordFormat(SourceFormat):
    """The base class of formats that implement only `records`. Their files are not split."""

    item = "record"

    def records(self, file: UnitReader) -> Iterator[Any]:
        """Yields the records (dicts) in order, and an Unfit in place of each record that cannot be read."""
        raise NotImplementedError

    def read(self, file: UnitReader, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
        extract = make_checked_extractor(reading)
        for line, record in enumerate(self.records(file), start=1):
            tally.counts.lines = line
            if not isinstance(record, dict | Unfit):
                what = f"`records` of {type(self).__name__} must yield a dict or Unfit, not a {type(record).__name__}"
                raise UserError(f"{what} (record {line:,} of {file.unit.path})")
            yield tally.extract(extract, record, line)


@cache
def source_format(name: str) -> SourceFormat:
    """Returns a format. `name`: the name of a built-in or installed format, or `module:Class`.

    Raises UserError if the format cannot be found or imported.
    """
    try:
        found = plugins.find("source", name, formats, "Format")
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a custom module may raise anything on import
        description = describe_user_exception(error) or describe_exception(error)
        raise UserError(f"{description} (on importing --format {name})") from error
    form = getattr(found, "Format", found)
    if not (isinstance(form, type) and issubclass(form, SourceFormat)):
        raise UserError(f"--format {name}: is not a source format; name a subclass of weft.data.sources.SourceFormat")
    base, method = (RecordFormat, "records") if issubclass(form, RecordFormat) else (SourceFormat, "read")
    if form.read is base.read and getattr(form, method) is getattr(base, method):
        raise UserError(f"--format {name}: {form.__name__} has no method {method}; add it (docs/data.md)")
    with format_errors(form):
        return form()


@contextmanager
def format_errors(form: type[SourceFormat], path: str | None = None) -> Iterator[None]:
    """A context manager that converts exceptions of a custom format to UserErrors.

    The UserError names the line in the format's source code.

    `path`: the file that the format reads, for the message.
    """
    try:
        yield
    except (UserError, Broken, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        description = describe_user_exception(error, getattr(sys.modules.get(form.__module__), "__file__", None))
        if description is None or form.__module__.startswith(f"{__package__}."):
            raise
        reading = f", reading {path}" if path is not None else ""
        raise UserError(f"{description} (in {form.__module__}:{form.__qualname__}{reading})") from error


def document_error(what: str, unit: Unit, line: int | None) -> UserError:
    """Returns a UserError with the message `what`, preceded by the document's file and position.

    `line`: number of the document's line (row, record) in the file; None: the document is the complete file.
    """
    item = source_format(unit.format).item
    if line is None or item == "line":
        return UserError(what, unit.path, line)
    return UserError(f"{item} {line:,}: {what}", unit.path)


def reject_message(reject: Reject, words: OptionNames = COMMAND) -> str:
    """Returns the error message for a rejected document that stops the command, with the remedies.

    Args:
        words: names of options in the message.
    """
    if words.name("chat_template") in reject.message:  # the template is wrong; the message has the remedy
        return reject.message
    return f"{reject.message}; fix the input, or {words.skip}"


@cache
def _by_suffix(packages: bool) -> dict[str, str]:
    """Returns a mapping from file name suffix to format name.

    `packages`: False for the built-in formats, True for the formats of installed packages.
    """
    names = plugins.plugins("source") if packages else plugins.built_ins(formats, "Format")
    return {suffix: name for name in reversed(list(names)) for suffix in source_format(name).suffixes}


def detect_format(path: Path, forced: str | None = None) -> tuple[str, str]:
    """Returns the format and the compression ("gz", "zst" or "") of a file, which the file name determines.

    `forced`: the format to return regardless of the file name.
    """
    stem, suffix = os.path.splitext(path.name.lower())
    compression = COMPRESSIONS.get(suffix, "")
    if compression:
        suffix = os.path.splitext(stem)[1]
    name = forced or _by_suffix(False).get(suffix)
    if name is None and suffix not in TEXT_SUFFIXES:
        name = _by_suffix(True).get(suffix)
    return name or "text", compression


def contents_by_format(files: Sequence[Path], reading: Reading) -> dict[str, str]:
    """Returns a mapping from format name to content type ("text", "rows" or "records"), for the formats of `files`."""
    names = {detect_format(path, reading.format)[0] for path in files}
    return {name: source_format(name).holds for name in sorted(names)}


def split_bytes(unit: Unit, range_bytes: int) -> list[Unit]:
    """Splits a file into byte ranges. Each line belongs to the range in which it begins (`UnitReader.line_blocks`)."""
    ranges = [(start, min(start + range_bytes, unit.size)) for start in range(0, unit.size, range_bytes)]
    return [replace(unit, start=start, stop=stop, size=stop - start) for start, stop in ranges]

"""The source format of JSON-lines files: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from itertools import chain
from typing import Any

import orjson

from weft.data.documents import Document, Reject
from weft.data.sources.read_options import Reading, Unit
from weft.data.sources.source_format import SourceFormat, Tally, split_bytes
from weft.data.sources.streams import BOM, UnitReader, is_utf16, peek_blocks, split_lines, too_long
from weft.data.sources.values import Unfit, check_unicode, make_extractor

BROKEN, NO_UTF8, TOO_DEEP = "broken JSON", "invalid UTF-8", "nested too deeply"


class Format(SourceFormat):
    suffixes = (".jsonl", ".ndjson", ".jl")

    def cut(self, unit: Unit, range_bytes: int) -> list[Unit]:
        return split_bytes(unit, range_bytes)

    def read(self, file: UnitReader, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
        if (lines := open_lines(file, tally)) is not None:
            yield from read_lines(lines, reading, tally)


class LineReader:
    """Reads lines in pieces of one or more lines. Lines can be pushed back, to be read again.

    Attributes:
        single_until: a line number. Up to this line, a JSON value must end on the line on which it begins; afterwards,
            a value can span several lines. Only the `.json` reader uses it.
    """

    def __init__(self, blocks: Iterator[bytes]):
        self.single_until = 0
        self._pieces = split_lines(blocks)
        self._pushed: list[tuple[bytes | None, int]] = []

    def next_piece(self) -> tuple[bytes | None, int] | None:
        """Returns a piece and the offset of the next line in the piece; None at the end.

        The piece is a bytes object of complete lines, or None for a line that is too long.
        """
        if self._pushed:
            return self._pushed.pop()
        return next(((piece, 0) for piece in self._pieces), None)

    def push_back(self, piece: bytes | None, at: int = 0) -> None:
        """Pushes back the lines of `piece` that begin at or after offset `at`. They are read next."""
        if piece is None or at < len(piece):
            self._pushed.append((piece, at))

    def __iter__(self) -> Iterator[bytes]:
        """Yields single lines; stops at the end, or before a line that is too long."""
        while (taken := self.next_piece()) is not None:
            piece, at = taken
            if piece is None:
                return self.push_back(None)
            end = piece.find(b"\n", at) + 1 or len(piece)
            self.push_back(piece, end)
            yield piece[at:end]


def open_lines(file: UnitReader, tally: Tally) -> LineReader | None:
    """Returns a reader of the unit's lines; None for a UTF-16 file, which is not read.

    Counts a UTF-16 file as skipped, once, in the file's first unit.
    """
    if file.unit.start:
        return None if is_utf16(file.head(2)) else LineReader(file.line_blocks())
    first, blocks = file.content(2) if file.unit.stop is None else peek_blocks(file.line_blocks(), len(BOM))
    if is_utf16(first):
        tally.skip_file("UTF-16")
        return None
    if first.startswith(BOM):  # a byte range; `content` has removed the BOM of a full file
        blocks = chain([next(blocks).removeprefix(BOM)], blocks)
    return LineReader(blocks)


def read_lines(
    lines: LineReader, reading: Reading, tally: Tally, *, stop: bool = False
) -> Generator[Document | Reject, None, bool]:
    """Yields one document per line. The first line has the number `tally.counts.lines + 1`.

    Args:
        stop: stop before a line that is broken JSON, instead of rejecting the line.

    Returns:
        Whether the generator stopped before a broken line. If so, `lines` continues with the broken line.
    """
    counts, extract, loads, new = tally.counts, make_extractor(reading), orjson.loads, tuple.__new__
    # The fast path is for a plain field; all else takes the slow path.
    key = None if reading.records or reading.template is not None or "." in reading.field else reading.field
    number = counts.lines
    while (taken := lines.next_piece()) is not None:
        piece, at = taken
        if piece is None:
            number += 1
            counts.lines = number
            yield tally.reject(number, too_long())
            continue
        documents = empty = size = 0
        stopped = False
        view, find, end_of_piece = memoryview(piece), piece.find, len(piece)
        while at < end_of_piece:
            begin, end = at, find(b"\n", at)
            line = view[at : end if end >= 0 else end_of_piece]  # no copy
            at = end + 1 if end >= 0 else end_of_piece
            number += 1
            # The fast path of nearly every line: parse, look up, count.
            try:
                text = loads(line)[key] if key is not None else None  # type: ignore[arg-type]
            except (ValueError, LookupError, TypeError):
                text = None
            if type(text) is str:
                documents += 1
                if text:
                    size += len(text) if text.isascii() else len(text.encode())
                else:
                    empty += 1
                yield new(Document, (text, number))
            elif not (raw := bytes(line)) or raw.isspace():
                counts.blank_lines += 1
            else:
                record = parse_line(raw)
                if stop and isinstance(record, Unfit) and record.reason in (BROKEN, NO_UTF8):
                    lines.push_back(piece, begin)
                    stopped, number = True, number - 1
                    break
                yield tally.extract(extract, record, number, len(raw.strip()))
        counts.documents += documents
        counts.empty += empty
        counts.bytes += size
        counts.lines = number
        if stopped:
            return True
    return False


def parse_line(line: bytes) -> Any:
    """Returns the JSON value of a line. Returns (does not raise) an Unfit for broken JSON or lone surrogates."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        pass
    # Python's parser accepts what orjson does not, such as NaN, and distinguishes invalid UTF-8.
    try:
        return check_unicode(json.loads(line.decode("utf-8"), parse_int=integer))
    except Unfit as error:
        return error
    except UnicodeDecodeError:
        return Unfit(NO_UTF8)
    except ValueError as error:
        return Unfit(BROKEN, str(error))
    except RecursionError:
        return Unfit(TOO_DEEP)


def integer(digits: str) -> int | float:
    """Parses a JSON integer; returns a float (possibly infinite) if it has more digits than Python allows for `int`."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)

"""JSON lines: one object a line."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from itertools import chain
from typing import Any

import orjson

from weft.data.documents import Document, Reject
from weft.data.sources.read_options import Reading, Unit
from weft.data.sources.source_format import SourceFormat, Tally, cut_lines
from weft.data.sources.streams import BOM, Raw, ahead, too_long, whole_lines, wide
from weft.data.sources.values import Unfit, checked, taker

BROKEN, NO_UTF8, TOO_DEEP = "broken JSON", "invalid UTF-8", "nested too deeply"


class Format(SourceFormat):
    suffixes = (".jsonl", ".ndjson", ".jl")

    def cut(self, whole: Unit, range_bytes: int) -> list[Unit]:
        """Ranges of bytes."""
        return cut_lines(whole, range_bytes)

    def read(self, file: Raw, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
        """The documents of a range of lines, or of a whole file."""
        if (lines := lines_of(file, tally)) is not None:
            yield from read_lines(lines, reading, tally)


class Lines:
    """Lines in pieces, with a way back to any line of the last piece.

    Attributes:
        alone: up to this line of the unit, each is a value or none, and no part of one.
    """

    def __init__(self, blocks: Iterator[bytes]):
        self.alone = 0
        self._pieces = whole_lines(blocks)
        self._back: list[tuple[bytes | None, int]] = []

    def take(self) -> tuple[bytes | None, int] | None:
        """Whole lines, and the place in them where the next one begins; nothing at the end. None in the lines' place
        stands for a line that is too long."""
        if self._back:
            return self._back.pop()
        return next(((piece, 0) for piece in self._pieces), None)

    def back(self, piece: bytes | None, at: int = 0) -> None:
        """Give lines back, from the place `at` on."""
        if piece is None or at < len(piece):
            self._back.append((piece, at))

    def __iter__(self) -> Iterator[bytes]:
        """One line after the other, up to the end or one that is too long."""
        while (taken := self.take()) is not None:
            piece, at = taken
            if piece is None:
                return self.back(None)
            end = piece.find(b"\n", at) + 1 or len(piece)
            self.back(piece, end)
            yield piece[at:end]


def lines_of(file: Raw, tally: Tally) -> Lines | None:
    """The lines of a unit; None of a file in UTF-16, which the unit in which the file begins counts."""
    if file.unit.start:
        return None if wide(file.begins(2)) else Lines(file.whole_lines())
    first, blocks = file.content(2) if file.unit.stop is None else ahead(file.whole_lines(), len(BOM))
    if wide(first):
        tally.skip_file("UTF-16")
        return None
    if first.startswith(BOM):  # of a range: `content` leaves it out
        blocks = chain([next(blocks).removeprefix(BOM)], blocks)
    return Lines(blocks)


def read_lines(
    lines: Lines, reading: Reading, tally: Tally, *, stop: bool = False
) -> Generator[Document | Reject, None, bool]:
    """The documents of lines, counted on from `tally.counts.lines`.

    Args:
        stop: stop before a line that is broken JSON; else such lines are rejects.

    Returns:
        Whether it stopped before such a line, which is the next one of `lines`.
    """
    counts, take, loads, new = tally.counts, taker(reading), orjson.loads, tuple.__new__
    # Of a plain field; what else there is takes the careful way.
    key = None if reading.records or reading.template is not None or "." in reading.field else reading.field
    number = counts.lines
    while (taken := lines.take()) is not None:
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
            # The way of nearly every line: nothing is done here but parse, look up, count.
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
                record = parsed(raw)
                if stop and isinstance(record, Unfit) and record.reason in (BROKEN, NO_UTF8):
                    lines.back(piece, begin)
                    stopped, number = True, number - 1
                    break
                yield tally.take(take, record, number, len(raw.strip()))
        counts.documents += documents
        counts.empty += empty
        counts.bytes += size
        counts.lines = number
        if stopped:
            return True
    return False


def parsed(line: bytes) -> Any:
    """The value of a line of JSON; an Unfit if it is broken, or holds what UTF-8 cannot."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        pass
    # Python's own parser takes what orjson does not, such as NaN beside the text, and tells bad UTF-8 apart.
    try:
        return checked(json.loads(line.decode("utf-8"), parse_int=integer))
    except Unfit as why:
        return why
    except UnicodeDecodeError:
        return Unfit(NO_UTF8)
    except ValueError as error:
        return Unfit(BROKEN, str(error))
    except RecursionError:
        return Unfit(TOO_DEEP)


def integer(digits: str) -> int | float:
    """A JSON integer; as a float (perhaps infinite) where Python refuses to read so many digits."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)

"""JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import orjson

from weft.data.documents import Document, Reject
from weft.data.sources import streams
from weft.data.sources.reading import Reading
from weft.data.sources.streams import Raw, again, head, unpacked, whole_lines, wide, without_bom
from weft.data.sources.tally import Tally
from weft.data.sources.values import Take, Unfit, checked, taker

TOO_DEEP = "nested too deeply"


def read(raw: Raw, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
    """The documents of a range of lines, or of a whole compressed file."""
    if raw.unit.start:
        if not wide(raw.begins(2)):  # else the range in which the file begins tells it
            yield from read_blocks(raw.whole_lines(), reading, tally)
        return
    blocks = raw.whole_lines() if raw.unit.stop is not None else unpacked(raw, raw.blocks())
    first = head(blocks, 2)
    if wide(first):
        tally.skip_file("UTF-16")
    else:
        yield from read_blocks(without_bom(again(first, blocks)), reading, tally)


def read_blocks(blocks: Iterator[bytes], reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
    """The documents of blocks of lines."""
    counts, take, loads, new = tally.counts, taker(reading), orjson.loads, tuple.__new__
    # Of a plain field; what else there is takes the careful way.
    key = None if reading.records or reading.template is not None or "." in reading.field else reading.field
    number = 0
    for lines in whole_lines(blocks):
        if lines is None:
            number += 1
            counts.lines = number
            yield tally.reject(number, too_long())
            continue
        documents = empty = size = at = 0
        view, find, stop = memoryview(lines), lines.find, len(lines)
        while at < stop:
            end = find(b"\n", at)
            line = view[at : end if end >= 0 else stop]  # no copy
            at = end + 1 if end >= 0 else stop
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
                yield _carefully(raw, number, take, reading.records, tally)
        counts.documents += documents
        counts.empty += empty
        counts.bytes += size
        counts.lines = number


def _carefully(line: bytes, number: int, take: Take, records: bool, tally: Tally) -> Document | Reject:
    try:
        value = take(parsed(line))
    except Unfit as why:
        return tally.reject(number, why)
    return tally.document(value, number, len(line.strip()) if records else None)


def too_long() -> Unfit:
    return Unfit(f"longer than {streams.LONGEST >> 20} MiB")


def parsed(line: bytes) -> Any:
    """The value of a line of JSON.

    Raises:
        Unfit: it is broken, or holds what UTF-8 cannot.
    """
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        pass
    # Python's own parser takes what orjson does not, such as NaN beside the text, and tells bad UTF-8 apart.
    try:
        return checked(json.loads(line.decode("utf-8"), parse_int=integer))
    except UnicodeDecodeError:
        raise Unfit("invalid UTF-8") from None
    except ValueError as error:
        raise Unfit("broken JSON", str(error)) from None
    except RecursionError:
        raise Unfit(TOO_DEEP) from None


def integer(digits: str) -> int | float:
    """A JSON integer; as a float (perhaps infinite) where Python refuses to read so many digits."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)

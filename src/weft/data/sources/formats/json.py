"""The source format of `.json` files: a list of records, or a sequence of records separated by any white space.

Files are parsed as a stream. Many `.json` files contain JSON lines; these are detected and read line by line.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from weft.data.documents import Document, Reject
from weft.data.sources import streams
from weft.data.sources.formats import jsonl
from weft.data.sources.read_options import Reading, Unit
from weft.data.sources.source_format import SourceFormat, Tally, split_bytes
from weft.data.sources.streams import BOM, HEAD, Broken, UnitReader, is_utf16, too_long
from weft.data.sources.values import Extractor, make_checked_extractor

BLANKS, BLANKS_OF_LINE = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r]*")


class Format(SourceFormat):
    suffixes = (".json",)

    def cut(self, unit: Unit, range_bytes: int) -> list[Unit]:
        """Splits a file of JSON lines into ranges of about `range_bytes` bytes; returns any other file as one unit."""
        return split_bytes(unit, range_bytes) if unit.size > range_bytes and is_json_lines(unit.path) else [unit]

    def read(self, file: UnitReader, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
        """Yields one document per record.

        In JSON lines, `Document.line` is the line on which the record begins; otherwise, the number of the record.
        """
        extract = make_checked_extractor(reading, escaped=True)
        if file.unit.stop is not None:
            lines = jsonl.open_lines(file, tally)
        else:
            first, blocks = file.content()
            if is_utf16(first):
                return tally.skip_file("UTF-16")
            if not looks_like_lines(first[:HEAD]):
                for number, record in enumerate(_ValueStream(_decode(blocks)).all_values(), start=1):
                    tally.counts.lines = number
                    yield tally.extract(extract, record, number)
                return
            lines = jsonl.LineReader(blocks)
        while lines is not None and (yield from jsonl.read_lines(lines, reading, tally, stop=True)):
            yield from _read_multiline(lines, extract, tally)


def is_json_lines(path: str) -> bool:
    """Whether a file contains JSON lines: each line that ends within the first MiB is one JSON object."""
    try:
        with open(path, "rb") as file:
            first = file.read(HEAD)
    except OSError:  # reading the file reports the error
        return False
    lines = first.removeprefix(BOM).split(b"\n")[: None if len(first) < HEAD else -1]
    records = [jsonl.parse_line(line) for line in lines if line.strip()]
    return bool(records) and all(isinstance(record, dict) for record in records)


def looks_like_lines(head: bytes) -> bool:
    """Whether a file that begins with `head` has one object per line; false for a list, or for multi-line objects."""
    first, end, rest = head.removeprefix(BOM).lstrip().partition(b"\n")
    if not first.startswith(b"{") or not end:
        return False
    return rest.lstrip(b"\r\n").startswith(b"{") or isinstance(jsonl.parse_line(first), dict)


def _decode(blocks: Iterator[bytes]) -> Iterator[str]:
    # Invalid UTF-8 becomes lone surrogates, so that only the record that contains them is rejected.
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    for block in blocks:
        yield decoder.decode(block)
    yield decoder.decode(b"", final=True)


def _read_multiline(lines: jsonl.LineReader, extract: Extractor, tally: Tally) -> Iterator[Document | Reject]:
    """Yields the documents of all values that begin on the next line. The last of these values can end on a later line.

    A broken value is rejected together with the rest of the line on which it begins. Reading resumes on the next line.
    """
    before = tally.counts.lines
    source = islice(lines, 1) if before < lines.single_until else lines
    text = _ValueStream(line.decode("utf-8", "surrogateescape") for line in source)
    while text.peek(BLANKS_OF_LINE) not in ("\n", ""):
        line = before + text.line()
        try:
            record = text.value(by_line=True)
        except Broken as error:
            deep = error.reason == jsonl.TOO_DEEP
            if deep:  # do not parse the values within the nested value again
                lines.single_until = line + text.rest().count("\n")
            yield tally.reject(line, error.reason if deep else jsonl.BROKEN, error.hint)
            break
        yield tally.extract(extract, record, line)
    tally.counts.lines = before + text.line()
    text.skip_line()
    lines.push_back(text.rest().encode("utf-8", "surrogateescape"))


class _ValueStream:
    """Parses a sequence of JSON values from a stream of text; keeps at most one value and one block in memory."""

    def __init__(self, texts: Iterator[str]):
        self._texts, self.text, self.at, self._ended = texts, "", 0, False
        self._line, self._counted = 1, 0
        self._decode = json.JSONDecoder(parse_int=jsonl.integer).raw_decode

    def line(self) -> int:
        """Returns the line number of the current position, from 1."""
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._line

    def rest(self) -> str:
        """Returns the text in the buffer after the current position."""
        return self.text[self.at :]

    def more(self) -> None:
        """Reads more text and at least doubles the buffer, so that a long value is parsed only a few times."""
        self.line()
        found, size = [self.rest()], 0
        while size <= len(found[0]) and not self._ended:
            piece = next(self._texts, None)
            self._ended = piece is None
            found.append(piece or "")
            size += len(piece or "")
        self.text, self.at, self._counted = "".join(found), 0, 0

    def peek(self, blanks: re.Pattern[str] = BLANKS) -> str:
        """Skips the characters that `blanks` matches, and returns the next character; "" at the end of the text."""
        while True:
            found = blanks.match(self.text, self.at)
            assert found is not None  # the pattern matches the empty string
            self.at = found.end()
            if self.at < len(self.text) or self._ended:
                return self.text[self.at : self.at + 1]
            self.more()

    def skip_line(self) -> None:
        """Skips to the beginning of the next line."""
        while (end := self.text.find("\n", self.at)) < 0 and not self._ended:
            self.more()
        self.at = end + 1 if end >= 0 else len(self.text)

    def value(self, *, by_line: bool = False) -> Any:
        """Parses and returns the JSON value at the current position.

        Args:
            by_line: whether the text is read in complete lines. Then an error before the end of the buffered text is
                final, and no more text is read.

        Raises:
            Broken: the value is broken, too long or nested too deeply, so the next value cannot be located.
        """
        while True:
            try:
                value, end = self._decode(self.text, self.at)
                if end < len(self.text) or self._ended:  # 12 may continue as 123
                    self.at = end
                    return value
            except RecursionError:
                raise Broken(jsonl.TOO_DEEP, "the rest is not read") from None
            except json.JSONDecodeError as error:
                if self._ended or (by_line and error.pos < len(self.text.rstrip())):
                    raise Broken("truncated or broken JSON", "the rest is not read") from None
            if len(self.text) - self.at > streams.LONGEST:
                raise Broken(too_long().reason, "or broken JSON: the rest is not read") from None
            self.more()

    def all_values(self) -> Iterator[Any]:
        """Yields the values of a JSON list or of a sequence of JSON values; raises Broken at an error."""
        listed = self.peek() == "["
        self.at += listed
        if listed and self.peek() == "]":
            self.at += 1
        else:
            while self.peek() or listed:
                yield self.value()
                if listed:
                    following = self.peek()
                    self.at += 1
                    if following == "]":
                        break
                    if following != ",":
                        raise Broken("truncated or broken JSON", "no comma and no ] after a record")
        if self.peek():
            raise Broken("broken JSON", "other text follows the list")

"""`.json`: a list of records, or records one after the other in any spacing, streamed; many such files hold JSON
lines, which are read as such from line to line."""

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
from weft.data.sources.source_format import SourceFormat, Tally, cut_lines
from weft.data.sources.streams import BOM, HEAD, Broken, Raw, too_long, wide
from weft.data.sources.values import Take, checking

BLANKS, BLANKS_OF_LINE = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r]*")


class Format(SourceFormat):
    suffixes = (".json",)

    def cut(self, whole: Unit, range_bytes: int) -> list[Unit]:
        """A big file of JSON lines is cut like one."""
        return cut_lines(whole, range_bytes) if whole.size > range_bytes and holds_lines(whole.path) else [whole]

    def read(self, file: Raw, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
        """The documents of the records; `line` is the line on which one begins, or its number in a list and where
        records take several lines."""
        take = checking(reading, escaped=True)
        if file.unit.stop is not None:
            lines = jsonl.lines_of(file, tally)
        else:
            first, blocks = file.content()
            if wide(first):
                return tally.skip_file("UTF-16")
            if not like_lines(first[:HEAD]):
                for number, record in enumerate(_Text(_decoded(blocks)).all_values(), start=1):
                    tally.counts.lines = number
                    yield tally.take(take, record, number)
                return
            lines = jsonl.Lines(blocks)
        while lines is not None and (yield from jsonl.read_lines(lines, reading, tally, stop=True)):
            yield from _to_the_end_of_a_line(lines, take, tally)


def holds_lines(path: str) -> bool:
    """Whether a file holds JSON lines: all that begin and end in its first MiB are one object each."""
    try:
        with open(path, "rb") as file:
            first = file.read(HEAD)
    except OSError:  # reading it will say what is wrong
        return False
    lines = first.removeprefix(BOM).split(b"\n")[: None if len(first) < HEAD else -1]
    found = [jsonl.parsed(line) for line in lines if line.strip()]
    return bool(found) and all(isinstance(record, dict) for record in found)


def like_lines(begins: bytes) -> bool:
    """Whether a file that begins so is one object a line, rather than a list or objects over many lines."""
    first, end, rest = begins.removeprefix(BOM).lstrip().partition(b"\n")
    if not first.startswith(b"{") or not end:
        return False
    return rest.lstrip(b"\r\n").startswith(b"{") or isinstance(jsonl.parsed(first), dict)


def _decoded(blocks: Iterator[bytes]) -> Iterator[str]:
    # Bytes that are no UTF-8 come out as lone surrogates: only the record that holds them is rejected.
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    for block in blocks:
        yield decoder.decode(block)
    yield decoder.decode(b"", final=True)


def _to_the_end_of_a_line(lines: jsonl.Lines, take: Take, tally: Tally) -> Iterator[Document | Reject]:
    """The values that begin on the next line, the last of which may end on a later one.

    A value that is broken is a reject, and so is the rest of the line on which it begins: the next line is read again.
    """
    before = tally.counts.lines
    given = islice(lines, 1) if before < lines.alone else lines
    text = _Text(line.decode("utf-8", "surrogateescape") for line in given)
    while text.peek(BLANKS_OF_LINE) not in ("\n", ""):
        line = before + text.line()
        try:
            record = text.value(by_line=True)
        except Broken as error:
            deep = error.reason == jsonl.TOO_DEEP
            if deep:  # what is within it need not be tried again and again
                lines.alone = line + text.rest().count("\n")
            yield tally.reject(line, error.reason if deep else jsonl.BROKEN, error.hint)
            break
        yield tally.take(take, record, line)
    tally.counts.lines = before + text.line()
    text.skip_line()
    lines.back(text.rest().encode("utf-8", "surrogateescape"))


class _Text:
    """JSON values one after the other, with no more than one of them and a block in memory."""

    def __init__(self, texts: Iterator[str]):
        self._texts, self.text, self.at, self._ended = texts, "", 0, False
        self._line, self._counted = 1, 0
        self._decode = json.JSONDecoder(parse_int=jsonl.integer).raw_decode

    def line(self) -> int:
        """The line of the place reached, from 1."""
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._line

    def rest(self) -> str:
        """What is behind the place reached, as far as it was read."""
        return self.text[self.at :]

    def more(self) -> None:
        """As much again as there is: a long value is tried a few times only, not once a block."""
        self.line()
        found, size = [self.rest()], 0
        while size <= len(found[0]) and not self._ended:
            piece = next(self._texts, None)
            self._ended = piece is None
            found.append(piece or "")
            size += len(piece or "")
        self.text, self.at, self._counted = "".join(found), 0, 0

    def peek(self, blanks: re.Pattern[str] = BLANKS) -> str:
        """The next character that is no blank; empty at the end."""
        while True:
            found = blanks.match(self.text, self.at)
            assert found is not None  # it matches nothing, too
            self.at = found.end()
            if self.at < len(self.text) or self._ended:
                return self.text[self.at : self.at + 1]
            self.more()

    def skip_line(self) -> None:
        """Go to the beginning of the next line."""
        while (end := self.text.find("\n", self.at)) < 0 and not self._ended:
            self.more()
        self.at = end + 1 if end >= 0 else len(self.text)

    def value(self, *, by_line: bool = False) -> Any:
        """The value that begins here.

        Args:
            by_line: text comes in whole lines: what is broken before their end stays so, whatever comes.

        Raises:
            Broken: it is broken, or too long or deep: there is no telling where the next one begins.
        """
        while True:
            try:
                value, end = self._decode(self.text, self.at)
                if end < len(self.text) or self._ended:  # 12 may go on as 123
                    self.at = end
                    return value
            except RecursionError:
                raise Broken(jsonl.TOO_DEEP, "what follows is not read") from None
            except json.JSONDecodeError as error:
                if self._ended or (by_line and error.pos < len(self.text.rstrip())):
                    raise Broken("truncated or broken JSON", "what follows is not read") from None
            if len(self.text) - self.at > streams.LONGEST:
                raise Broken(too_long().reason, "or broken JSON: what follows is not read") from None
            self.more()

    def all_values(self) -> Iterator[Any]:
        """The values of a list, or of a sequence of values.

        Raises:
            Broken: (from the iterator) what follows cannot be read.
        """
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
                        raise Broken("truncated or broken JSON", "no comma and no ] behind a record")
        if self.peek():
            raise Broken("broken JSON", "something follows the list")

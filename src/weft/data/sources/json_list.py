"""`.json`: a list of records, or records one after the other, streamed; many such files hold JSON lines."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from weft.config.errors import UserError
from weft.data.documents import Document, Reject
from weft.data.sources import lines, streams
from weft.data.sources.reading import Reading
from weft.data.sources.streams import BOM, HEAD, Broken, Raw, again, head, unpacked, wide, without_bom
from weft.data.sources.tally import Tally
from weft.data.sources.values import Unfit, checked, taker

BLANKS = re.compile(r"[ \t\r\n]*")


def holds_lines(path: str) -> bool:
    """Whether a `.json` file holds JSON lines."""
    try:
        with open(path, "rb") as file:
            return like_lines(file.read(HEAD))
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", path) from None


def like_lines(begins: bytes) -> bool:
    """Whether a file that begins so is one object a line, rather than a list or an object over many lines."""
    first, end, rest = begins.removeprefix(BOM).lstrip().partition(b"\n")
    if not first.startswith(b"{"):
        return False
    if not end or rest.lstrip(b"\r\n").startswith(b"{"):
        return True
    try:
        json.loads(first, parse_int=lines.integer)
    except (ValueError, RecursionError):
        return False
    return True


def read(raw: Raw, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
    """The documents of the file's records; `line` is the number of the record, or of the line if it has one a line."""
    blocks = without_bom(unpacked(raw, raw.blocks()))
    first = head(blocks, HEAD)
    if wide(first):
        tally.skip_file("UTF-16")
        return
    blocks = again(first, blocks)
    if like_lines(first[:HEAD]):
        yield from lines.read_blocks(blocks, reading, tally)
        return
    take = taker(reading)
    for number, record in enumerate(_values(_decoded(blocks)), start=1):
        tally.counts.lines = number
        try:
            value = checked(take(record), escaped=True)
        except Unfit as why:
            yield tally.reject(number, why)
        else:
            yield tally.document(value, number)


def _decoded(blocks: Iterator[bytes]) -> Iterator[str]:
    # Bytes that are no UTF-8 come out as lone surrogates: only the record that holds them is rejected.
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    for block in blocks:
        yield decoder.decode(block)
    yield decoder.decode(b"", final=True)


def _values(texts: Iterator[str]) -> Iterator[Any]:
    """The values of a list, or of a sequence of values, with no more than one of them and a block in memory.

    Raises:
        Broken: (from the iterator) what follows cannot be read: there is no telling where the next value begins.
    """
    decode = json.JSONDecoder(parse_int=lines.integer).raw_decode
    text, at, ended = "", 0, False

    def more() -> None:
        """As much again as there is: a long value is tried a few times only, not once a block."""
        nonlocal text, at, ended
        found, size = [text[at:]], 0
        while size <= len(found[0]) and not ended:
            piece = next(texts, None)
            ended = piece is None
            found.append(piece or "")
            size += len(piece or "")
        text, at = "".join(found), 0

    def peek() -> str:
        """The next character that is no blank; empty at the end."""
        nonlocal at
        while True:
            at = BLANKS.match(text, at).end()  # type: ignore[union-attr]
            if at < len(text) or ended:
                return text[at : at + 1]
            more()

    listed = peek() == "["
    at += listed
    if listed and peek() == "]":
        at += 1
    else:
        while peek() or listed:
            while True:
                try:
                    value, end = decode(text, at)
                except ValueError as error:
                    value, end = error, len(text)
                except RecursionError:
                    raise Broken(lines.TOO_DEEP, "what follows is not read") from None
                if not isinstance(value, Exception) and (end < len(text) or ended):  # 12 may go on as 123
                    break
                if ended:
                    raise Broken("truncated or broken JSON", "what follows is not read") from None
                if len(text) - at > streams.LONGEST:
                    raise Broken(lines.too_long().reason, "or broken JSON: what follows is not read") from None
                more()
            yield value
            at = end
            if listed:
                following = peek()
                at += 1
                if following == "]":
                    break
                if following != ",":
                    raise Broken("truncated or broken JSON", "no comma and no ] behind a record")
    if peek():
        raise Broken("broken JSON", "something follows the list")

"""Plain text: a file is one document, or many between separators."""

from __future__ import annotations

from collections.abc import Iterator

from weft.data.documents import Document, Reject
from weft.data.sources import streams
from weft.data.sources.lines import too_long
from weft.data.sources.reading import Reading
from weft.data.sources.streams import HEAD, Raw, again, head, pieces, unpacked, wide, without_bom
from weft.data.sources.tally import Tally
from weft.data.sources.values import Unfit


def read(raw: Raw, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
    """The documents of a text file; none of a binary one, or where records are asked for: such files are counted."""
    blocks = unpacked(raw, raw.blocks())
    first = head(blocks, HEAD)
    if reason := "text" if reading.records else binary(first):
        tally.skip_file(reason)
        return
    blocks = without_bom(again(first, blocks))
    yield from _between(blocks, reading.separator, tally) if reading.separator else _one(blocks, tally)


def binary(first: bytes) -> str:
    """Why a file that begins so holds no text; empty if it may."""
    if wide(first):
        return "UTF-16"
    return "binary" if b"\0" in first[:8192] else ""


def _one(blocks: Iterator[bytes], tally: Tally) -> Iterator[Document | Reject]:
    whole, size = [], 0
    for block in blocks:
        whole.append(block)
        size += len(block)
        if size > streams.LONGEST:
            yield tally.reject(None, too_long().reason, "--separator splits a text file into documents")
            return
    try:
        yield tally.document(b"".join(whole).decode("utf-8"), None)
    except UnicodeDecodeError:
        yield tally.reject(None, "invalid UTF-8")


def _between(blocks: Iterator[bytes], separator: str, tally: Tally) -> Iterator[Document | Reject]:
    first = head(blocks, HEAD)
    end = first.find(b"\n", 0, HEAD)
    if end > 0 and "\r" not in separator and first[end - 1 : end] == b"\r":  # lines end as Windows' do
        separator = separator.replace("\n", "\r\n")
    mark = separator.encode("utf-8")
    newlines, line = mark.count(b"\n"), 1
    for found in pieces(again(first, blocks), mark):
        for piece in found:
            try:
                if piece is None:
                    raise too_long()
                if not piece or piece.isspace():
                    tally.counts.blank_lines += 1
                else:
                    yield tally.document(piece.decode("utf-8"), line)
            except (Unfit, UnicodeDecodeError) as why:
                yield tally.reject(line, why if isinstance(why, Unfit) else "invalid UTF-8")
            line += (piece or b"").count(b"\n") + newlines
        tally.counts.lines += len(found)

"""Plain text: a file is one document, or many between separators."""

from __future__ import annotations

from collections.abc import Iterator

from weft.data.documents import Document, Reject
from weft.data.sources import streams
from weft.data.sources.read_options import Reading
from weft.data.sources.source_format import SourceFormat, Tally
from weft.data.sources.streams import HEAD, Raw, ahead, no_text, pieces, too_long
from weft.data.sources.values import Unfit


class Format(SourceFormat):
    holds = "text"

    def read(self, file: Raw, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
        """The documents of a file; none of a binary one, or where records are asked for: such files are counted."""
        first, blocks = file.content()
        if reason := "text" if reading.records else no_text(first):
            tally.skip_file(reason)
        else:
            yield from _between(blocks, reading.separator, tally) if reading.separator else _one(blocks, tally)


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
    first, blocks = ahead(blocks, HEAD)
    end = first.find(b"\n", 0, HEAD)
    if end > 0 and "\r" not in separator and first[end - 1 : end] == b"\r":  # lines end as Windows' do
        separator = separator.replace("\n", "\r\n")
    mark = separator.encode("utf-8")
    newlines, line = mark.count(b"\n"), 1
    for found in pieces(blocks, mark):
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

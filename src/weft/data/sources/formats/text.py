"""The source format of plain text files. A file is one document, or is split into documents at a separator."""

from __future__ import annotations

from collections.abc import Iterator

from weft.data.documents import Document, Reject
from weft.data.sources import streams
from weft.data.sources.read_options import Reading
from weft.data.sources.source_format import SourceFormat, Tally
from weft.data.sources.streams import HEAD, UnitReader, peek_blocks, skip_reason, split_by, too_long
from weft.data.sources.values import Unfit


class Format(SourceFormat):
    holds = "text"

    def read(self, file: UnitReader, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
        """Yields the documents of a file. Skips binary files; with `Reading.records`, skips all files."""
        first, blocks = file.content()
        if reason := "text" if reading.records else skip_reason(first):
            tally.skip_file(reason)
        else:
            yield from _split(blocks, reading.separator, tally) if reading.separator else _one(blocks, tally)


def _one(blocks: Iterator[bytes], tally: Tally) -> Iterator[Document | Reject]:
    found, size = [], 0
    for block in blocks:
        found.append(block)
        size += len(block)
        if size > streams.LONGEST:
            yield tally.reject(None, too_long().reason, "use --separator to split the file into documents")
            return
    try:
        yield tally.document(b"".join(found).decode("utf-8"), None)
    except UnicodeDecodeError:
        yield tally.reject(None, "invalid UTF-8")


def _split(blocks: Iterator[bytes], separator: str, tally: Tally) -> Iterator[Document | Reject]:
    first, blocks = peek_blocks(blocks, HEAD)
    end = first.find(b"\n", 0, HEAD)
    if end > 0 and "\r" not in separator and first[end - 1 : end] == b"\r":  # Windows line ends
        separator = separator.replace("\n", "\r\n")
    encoded = separator.encode("utf-8")
    newlines, line = encoded.count(b"\n"), 1
    for found in split_by(blocks, encoded):
        for piece in found:
            try:
                if piece is None:
                    raise too_long()
                if not piece or piece.isspace():
                    tally.counts.blank_lines += 1
                else:
                    yield tally.document(piece.decode("utf-8"), line)
            except (Unfit, UnicodeDecodeError) as error:
                yield tally.reject(line, error if isinstance(error, Unfit) else "invalid UTF-8")
            line += (piece or b"").count(b"\n") + newlines
        tally.counts.lines += len(found)

"""CSV with a header. Python's own parser: it takes a cell of any length, and says where a row is broken."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from weft.data.documents import Document, Reject
from weft.data.sources import streams
from weft.data.sources.read_options import Reading
from weft.data.sources.source_format import SourceFormat, Tally
from weft.data.sources.streams import Broken, Raw, no_text, pieces, too_long
from weft.data.sources.values import checking


class Format(SourceFormat):
    suffixes = (".csv",)
    holds = "rows"
    delimiter = ","

    def read(self, file: Raw, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
        """The documents of the rows; `line` is where in the file a row begins. Every cell is text, an empty one too."""
        first, blocks = file.content()
        if reason := no_text(first):
            tally.skip_file(reason)
            return
        csv.field_size_limit(streams.LONGEST)
        # strict: a quote that is never closed is an error, and not a cell that holds the rest of the file.
        rows = csv.reader(_lines(blocks), delimiter=self.delimiter, strict=True)
        take, header = checking(reading, escaped=True), None
        while True:
            line = rows.line_num + 1
            try:
                row = next(rows)
            except StopIteration:
                break
            except csv.Error as error:
                last = rows.line_num if rows.line_num > line else None
                upto = f", lines {line:,} to {last:,}" if last else ""
                yield tally.reject(line, "broken CSV", f"{error}{upto}", last)
                continue
            if not row:
                tally.counts.blank_lines += 1
            elif header is None:
                header = row
            elif len(row) != len(header):
                hint = f"{len(row)}, not {len(header)}"
                yield tally.reject(line, "not as many cells as the header", hint)
            else:
                record = dict(zip(header, row, strict=True))
                yield tally.take(take, record, line)
        tally.counts.lines = rows.line_num


def _lines(blocks: Iterator[bytes]) -> Iterator[str]:
    for lines in pieces(blocks, b"\n"):
        for line in lines:
            if line is None:
                raise Broken(too_long().reason)
            # Bytes that are no UTF-8 come out as lone surrogates, and `checked` finds them in their row.
            yield (line + b"\n").decode("utf-8", "surrogateescape")

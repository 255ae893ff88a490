"""The source format of CSV files with a header.

Python's parser is used, because it reads cells of any length and locates broken rows.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator

from weft.data.documents import Document, Reject
from weft.data.sources import streams
from weft.data.sources.read_options import Reading
from weft.data.sources.source_format import SourceFormat, Tally
from weft.data.sources.streams import Broken, UnitReader, skip_reason, split_by, too_long
from weft.data.sources.values import make_checked_extractor


class Format(SourceFormat):
    suffixes = (".csv",)
    holds = "rows"
    delimiter = ","

    def read(self, file: UnitReader, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
        """Yields one document per row. `Document.line` is the line on which the row begins. All cells are text."""
        first, blocks = file.content()
        if reason := skip_reason(first):
            tally.skip_file(reason)
            return
        csv.field_size_limit(streams.LONGEST)
        # strict: an unclosed quote is an error. Otherwise, the rest of the file would become one cell.
        rows = csv.reader(_lines(blocks), delimiter=self.delimiter, strict=True)
        extract, header = make_checked_extractor(reading, escaped=True), None
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
                hint = f"{len(row)} instead of {len(header)}"
                yield tally.reject(line, "not as many cells as the header", hint)
            else:
                yield tally.extract(extract, dict(zip(header, row, strict=True)), line)
        tally.counts.lines = rows.line_num


def _lines(blocks: Iterator[bytes]) -> Iterator[str]:
    for lines in split_by(blocks, b"\n"):
        for line in lines:
            if line is None:
                raise Broken(too_long().reason)
            # Invalid UTF-8 becomes lone surrogates, for which `check_unicode` rejects the row.
            yield (line + b"\n").decode("utf-8", "surrogateescape")

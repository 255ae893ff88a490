"""CSV and TSV with a header. Python's own parser: it takes a cell of any length, and says where a row is broken."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from weft.data.documents import Document, Reject
from weft.data.sources import streams
from weft.data.sources.lines import too_long
from weft.data.sources.reading import Reading
from weft.data.sources.streams import HEAD, Broken, Raw, again, head, pieces, unpacked, without_bom
from weft.data.sources.tally import Tally
from weft.data.sources.text import binary
from weft.data.sources.values import Unfit, checked, taker


def read(raw: Raw, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
    """The documents of the rows; `line` is where in the file a row begins. Every cell is text, an empty one too."""
    blocks = unpacked(raw, raw.blocks())
    first = head(blocks, HEAD)
    if reason := binary(first):
        tally.skip_file(reason)
        return
    csv.field_size_limit(streams.LONGEST)
    # strict: a quote that is never closed is an error, and not a cell that holds the rest of the file.
    delimiter = "\t" if raw.unit.kind.startswith("tsv") else ","
    rows = csv.reader(_lines(without_bom(again(first, blocks))), delimiter=delimiter, strict=True)
    take, header = taker(reading), None
    while True:
        line = rows.line_num + 1
        try:
            row = next(rows)
            if not row:
                tally.counts.blank_lines += 1
            elif header is None:
                header = row
            elif len(row) != len(header):
                raise Unfit("not as many cells as the header", f"{len(row)}, not {len(header)}")
            else:
                value = checked(take(dict(zip(header, row, strict=True))), escaped=True)
                yield tally.document(value, line)
        except StopIteration:
            break
        except csv.Error as error:
            yield tally.reject(line, "broken CSV", str(error))
        except Unfit as why:
            yield tally.reject(line, why)
    tally.counts.lines = rows.line_num


def _lines(blocks: Iterator[bytes]) -> Iterator[str]:
    for lines in pieces(blocks, b"\n"):
        for line in lines:
            if line is None:
                raise Broken(too_long().reason)
            # Bytes that are no UTF-8 come out as lone surrogates, and `checked` finds them in their row.
            yield (line + b"\n").decode("utf-8", "surrogateescape")

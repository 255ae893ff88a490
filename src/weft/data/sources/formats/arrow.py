"""The source format of Arrow files and streams, and of Feather files."""

from __future__ import annotations

from collections.abc import Iterator

from weft.data.documents import Document, Reject
from weft.data.sources.read_options import Reading
from weft.data.sources.source_format import SourceFormat, Tally
from weft.data.sources.streams import UnitReader


class Format(SourceFormat):
    suffixes = (".arrow", ".feather", ".ipc")
    holds = "rows"
    item = "row"

    def read(self, file: UnitReader, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
        from weft.data.sources import tables  # imports pyarrow

        return tables.read(tables.arrow_rows, file, reading, tally)

"""Arrow files and streams, also Feather's."""

from __future__ import annotations

from collections.abc import Iterator

from weft.data.documents import Document, Reject
from weft.data.sources.read_options import Reading
from weft.data.sources.source_format import SourceFormat, Tally
from weft.data.sources.streams import Raw


class Format(SourceFormat):
    suffixes = (".arrow", ".feather", ".ipc")
    holds = "rows"
    counted = "row"

    def read(self, file: Raw, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
        """The documents of the rows; `line` is the row."""
        from weft.data.sources import tables  # imports pyarrow

        return tables.read(tables.arrow, file, reading, tally)

"""Parquet: only the columns that are needed, cut by row groups."""

from __future__ import annotations

from collections.abc import Iterator

from weft.data.documents import Document, Reject
from weft.data.sources.read_options import Reading, Unit
from weft.data.sources.source_format import SourceFormat, Tally
from weft.data.sources.streams import Raw


class Format(SourceFormat):
    suffixes = (".parquet", ".pq")
    holds = "rows"
    counted = "row"
    positions = "row groups"

    def cut(self, whole: Unit, range_bytes: int) -> list[Unit]:
        """Units of whole row groups, each of about `range_bytes` on disk or one group."""
        from weft.data.sources import tables  # imports pyarrow

        return tables.cut_parquet(whole, range_bytes)

    def read(self, file: Raw, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
        """The documents of the rows; `line` is the row."""
        from weft.data.sources import tables

        return tables.read(tables.parquet, file, reading, tally)

"""The source format of Parquet files: reads only the required columns, and splits files by row groups."""

from __future__ import annotations

from collections.abc import Iterator

from weft.data.documents import Document, Reject
from weft.data.sources.read_options import Reading, Unit
from weft.data.sources.source_format import SourceFormat, Tally
from weft.data.sources.streams import UnitReader


class Format(SourceFormat):
    suffixes = (".parquet", ".pq")
    holds = "rows"
    item = "row"
    positions = "row groups"

    def cut(self, unit: Unit, range_bytes: int) -> list[Unit]:
        from weft.data.sources import tables  # imports pyarrow

        return tables.split_parquet(unit, range_bytes)

    def read(self, file: UnitReader, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
        from weft.data.sources import tables

        return tables.read(tables.parquet_rows, file, reading, tally)

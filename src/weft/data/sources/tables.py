"""Reads Parquet and Arrow files with pyarrow: only the required columns, a few thousand rows at a time."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from weft.data.documents import Document, Reject
from weft.data.sources.read_options import Reading, Unit
from weft.data.sources.source_format import Tally
from weft.data.sources.streams import Broken, UnitReader
from weft.data.sources.values import Unfit, as_text, make_extractor, no_field, required_fields
from weft.errors import UserError

ROWS = 8192  # maximum number of rows per batch
BYTES = 16 << 20  # approximate number of bytes per batch
ARROW_FILE = b"ARROW1"


def split_parquet(unit: Unit, range_bytes: int) -> list[Unit]:
    """Splits a Parquet file into units of consecutive row groups.

    Each unit, except the last, has at least `range_bytes` bytes on disk.
    """
    try:
        starts = _group_starts(pq.read_metadata(unit.path))
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return [unit]  # reading the file reports the error
    units, first = [], 0
    for group in range(1, len(starts) + 1):
        end = starts[group] if group < len(starts) else unit.size
        if group == len(starts) or end - starts[first] >= range_bytes:
            units.append(replace(unit, start=first, stop=group, size=end - starts[first]))
            first = group
    return units or [unit]


def _group_starts(metadata: Any) -> list[int]:
    """Returns the byte offset of each row group; 0 for the first group, so that all groups together cover the file.

    Args:
        metadata: pyarrow's metadata of a Parquet file.
    """
    starts: list[int] = []
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        column = row_group.column(0) if row_group.num_columns else None
        begin = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)), default=0) if column else 0
        starts.append(max(begin, starts[-1]) if starts else 0)
    return starts


def read(
    rows: Callable[[UnitReader, Reading, Tally], Iterator[Document | Reject]],
    file: UnitReader,
    reading: Reading,
    tally: Tally,
) -> Iterator[Document | Reject]:
    """Yields the documents and rejected documents that `rows` (`parquet_rows` or `arrow_rows`) reads from a file.

    Raises:
        UserError: the file is compressed or a pipe.
        Broken: pyarrow cannot read the file.
    """
    unit = file.unit
    if unit.stream or unit.compression:
        source = f"compressed as .{unit.compression}" if unit.compression else "from a pipe"
        raise UserError(f"{unit.format} cannot be read {source}; use an uncompressed file on disk", unit.path)
    try:
        if unit.size == 0:
            raise Broken(f"empty {unit.format} file")
        yield from rows(file, reading, tally)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        file.count_to(None)
        raise Broken(f"broken {unit.format} file", next(iter(str(error).splitlines()), "")) from None


def parquet_rows(file: UnitReader, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
    """Yields the documents of the row groups in a unit of a Parquet file."""
    with pq.ParquetFile(file.unit.path, buffer_size=1 << 20, pre_buffer=False) as table:
        metadata = table.metadata
        stop = metadata.num_row_groups if file.unit.stop is None else file.unit.stop
        starts = [*_group_starts(metadata), None]
        file.file.seek(starts[file.unit.start] or 0)
        columns = _columns(table.schema_arrow.names, reading)
        for group in range(file.unit.start, stop):
            row_group = metadata.row_group(group)
            if isinstance(columns, Unfit):
                yield from _reject_all(row_group.num_rows, columns, tally)
            else:
                rows = _batch_rows(row_group.num_rows, row_group.total_byte_size)
                for batch in table.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False):
                    yield from _documents(batch, reading, tally)
            file.count_to(starts[group + 1], complete=False)
        file.count_to(starts[stop])


def arrow_rows(file: UnitReader, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
    """Yields the documents of an Arrow file or stream."""
    # The map is closed when the last batch that refers to it is deleted.
    mapped = mmap.mmap(file.file.fileno(), 0, access=mmap.ACCESS_READ)
    for batch, position in _batches(pa.BufferReader(pa.py_buffer(mapped)), file.unit.size):
        batch.validate()
        columns = _columns(batch.schema.names, reading)
        if isinstance(columns, Unfit):
            yield from _reject_all(batch.num_rows, columns, tally)
        else:
            batch = batch if columns is None else batch.select(columns)
            rows = _batch_rows(batch.num_rows, batch.nbytes)
            for begin in range(0, batch.num_rows, rows):
                yield from _documents(batch.slice(begin, rows), reading, tally)
                if hasattr(mapped, "madvise"):  # frees the pages that have been read
                    mapped.madvise(mmap.MADV_DONTNEED)
        file.count_to(position, complete=False)
    file.count_to(None)


def _batches(source: Any, size: int) -> Iterator[tuple[Any, int]]:
    """Yields each batch of an Arrow file or stream, with the approximate byte offset at which the batch ends.

    Args:
        source: the opened file.
        size: size of the file in bytes.
    """
    if source.read(len(ARROW_FILE)) == ARROW_FILE:
        try:
            file = pa.ipc.open_file(source)
        except pa.ArrowInvalid:  # the footer is missing or damaged: the rest is an Arrow stream
            source.seek(8)
            for batch in pa.ipc.open_stream(source):
                yield batch, source.tell()
            raise
        number = file.num_record_batches
        for i in range(number):
            yield file.get_batch(i), size * (i + 1) // number
    else:
        source.seek(0)
        for batch in pa.ipc.open_stream(source):
            yield batch, source.tell()


def _batch_rows(rows: int, size: int) -> int:
    return max(1, min(ROWS, rows * BYTES // max(size, 1)))


def _columns(names: list[str], reading: Reading) -> list[str] | Unfit | None:
    """Returns the names of the columns to read; None to read all columns; an Unfit if a column is missing.

    `names`: the names of the file's columns.
    """
    fields = required_fields(reading)
    if fields is None:
        return None
    columns = []
    for field in fields:
        column = field if field in names else field.partition(".")[0]
        if column not in names:
            return no_field(field, names)
        columns.append(column)
    return list(dict.fromkeys(columns))


def _reject_all(rows: int, reason: Unfit, tally: Tally) -> Iterator[Reject]:
    for _ in range(rows):
        tally.counts.lines += 1
        yield tally.reject(tally.counts.lines, reason)


def _documents(batch: Any, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
    field = reading.field
    if not reading.records and reading.template is None and field in batch.schema.names:
        values = _column(batch.column(field))
        extract = lambda value: as_text(value, field)  # noqa: E731
    else:
        values, extract = _records(batch), make_extractor(reading)
    for value in values:
        tally.counts.lines += 1
        yield tally.extract(extract, value, tally.counts.lines)


def _column(column: Any) -> list[Any]:
    """Returns the values of a column, with an Unfit in place of each value that contains invalid UTF-8.

    The column is validated first, because the offsets in a damaged file can point outside of the buffer.
    """
    if pa.types.is_dictionary(column.type):
        column.validate(full=True)
        column = column.dictionary_decode()
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        column = column.view(_binary_type(column.type))
        column.validate(full=True)
        return [_decode(value) for value in column.to_pylist()]
    return column.to_pylist()


def _records(batch: Any) -> list[Any]:
    """Returns the rows as dicts, with an Unfit in place of each row that contains invalid UTF-8."""
    names, columns = batch.schema.names, [_column(column) for column in batch.columns]
    rows = zip(*columns, strict=True) if columns else [()] * batch.num_rows
    records: list[Any] = []
    for row in rows:
        unfit = next((value for value in row if isinstance(value, Unfit)), None)
        records.append(unfit or dict(zip(names, row, strict=True)))
    return records


def _decode(value: Any) -> Any:
    """Decodes all bytes objects in a nested value from UTF-8; returns an Unfit if one of them is invalid."""
    try:
        return _decode_strings(value)
    except UnicodeDecodeError:
        return Unfit("invalid UTF-8")


def _decode_strings(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, dict):
        return {key: _decode_strings(item) for key, item in value.items()}
    return [_decode_strings(item) for item in value] if isinstance(value, list) else value


def _binary_type(kind: Any) -> Any:
    """Returns the Arrow type `kind` with all string types, also nested ones, replaced by binary types."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_binary_type(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_binary_type(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_binary_type(kind.value_type)))
    return kind

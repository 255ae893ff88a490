"""Parquet and Arrow by pyarrow: only the columns that are needed, a few thousand rows at a time."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from weft.data.documents import Document, Reject
from weft.data.sources.read_options import Reading, Unit
from weft.data.sources.source_format import Tally
from weft.data.sources.streams import Broken, Raw
from weft.data.sources.values import Unfit, as_text, fields_of, taker
from weft.errors import UserError

ROWS = 8192  # at most so many at once,
BYTES = 16 << 20  # and about so much memory
ARROW_FILE = b"ARROW1"


def cut_parquet(whole: Unit, range_bytes: int) -> list[Unit]:
    """Units of whole row groups, each of about `range_bytes` on disk or one group."""
    try:
        starts = _group_starts(pq.read_metadata(whole.path))
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return [whole]  # reading it will say what is wrong
    units, first = [], 0
    for group in range(1, len(starts) + 1):
        end = starts[group] if group < len(starts) else whole.size
        if group == len(starts) or end - starts[first] >= range_bytes:
            units.append(whole.part(first, group, end - starts[first]))
            first = group
    return units or [whole]


def _group_starts(metadata: Any) -> list[int]:
    """The byte where each row group begins, of which the first counts as 0: so all units together are the file."""
    starts: list[int] = []
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        column = row_group.column(0) if row_group.num_columns else None
        begin = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)), default=0) if column else 0
        starts.append(max(begin, starts[-1]) if starts else 0)
    return starts


def read(
    rows: Callable[[Raw, Reading, Tally], Iterator[Document | Reject]], raw: Raw, reading: Reading, tally: Tally
) -> Iterator[Document | Reject]:
    """The documents of the rows; `line` is the row.

    Args:
        rows: `parquet` or `arrow`.
    """
    form, packed = raw.unit.format, raw.unit.packed
    if raw.unit.stream or packed:
        what = f"{form} cannot be read {'packed as .' + packed if packed else 'from a pipe'}; give it as a plain file"
        raise UserError(what, raw.unit.path)
    try:
        if raw.unit.size == 0:
            raise Broken(f"empty {form} file")
        yield from rows(raw, reading, tally)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raw.advance(None)
        raise Broken(f"broken {form} file", next(iter(str(error).splitlines()), "")) from None


def parquet(raw: Raw, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
    """Of the unit's row groups."""
    with pq.ParquetFile(raw.unit.path, buffer_size=1 << 20, pre_buffer=False) as file:
        metadata = file.metadata
        stop = metadata.num_row_groups if raw.unit.stop is None else raw.unit.stop
        starts = [*_group_starts(metadata), None]
        raw.seek(starts[raw.unit.start] or 0)
        columns = _columns(file.schema_arrow.names, reading)
        for group in range(raw.unit.start, stop):
            about = metadata.row_group(group)
            if isinstance(columns, Unfit):
                yield from _all_unfit(about.num_rows, columns, tally)
            else:
                rows = _rows_at_once(about.num_rows, about.total_byte_size)
                for batch in file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False):
                    yield from _documents(batch, reading, tally)
            raw.advance(starts[group + 1])
        raw.advance(starts[stop])
        raw.finish()


def arrow(raw: Raw, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
    """Of an Arrow file or stream."""
    # It is closed when the last batch that lies in it is gone.
    mapped = mmap.mmap(raw.file.fileno(), 0, access=mmap.ACCESS_READ)
    for batch, position in _batches(pa.BufferReader(pa.py_buffer(mapped)), raw.unit.size):
        batch.validate()
        columns = _columns(batch.schema.names, reading)
        if isinstance(columns, Unfit):
            yield from _all_unfit(batch.num_rows, columns, tally)
        else:
            batch = batch if columns is None else batch.select(columns)
            rows = _rows_at_once(batch.num_rows, batch.nbytes)
            for begin in range(0, batch.num_rows, rows):
                yield from _documents(batch.slice(begin, rows), reading, tally)
                if hasattr(mapped, "madvise"):  # what has been read is not this process's memory any more
                    mapped.madvise(mmap.MADV_DONTNEED)
        raw.advance(position)
    raw.advance(None)


def _batches(source: Any, size: int) -> Iterator[tuple[Any, int]]:
    """The batches of an Arrow file or stream, and about how many bytes have been read with each."""
    if source.read(len(ARROW_FILE)) == ARROW_FILE:
        try:
            file = pa.ipc.open_file(source)
        except pa.ArrowInvalid:  # its end is cut off or damaged: what is before it is a stream
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


def _rows_at_once(rows: int, size: int) -> int:
    return max(1, min(ROWS, rows * BYTES // max(size, 1)))


def _columns(names: list[str], reading: Reading) -> list[str] | Unfit | None:
    """The columns to read; None: all; Unfit: one of them is not there."""
    fields = fields_of(reading)
    if fields is None:
        return None
    columns = []
    for field in fields:
        column = field if field in names else field.partition(".")[0]
        if column not in names:
            shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
            return Unfit(f"no field {field!r}", f"it has {shown or 'none'}; --field or --template names another")
        columns.append(column)
    return list(dict.fromkeys(columns))


def _all_unfit(rows: int, why: Unfit, tally: Tally) -> Iterator[Reject]:
    for _ in range(rows):
        tally.counts.lines += 1
        yield tally.reject(tally.counts.lines, why)


def _documents(batch: Any, reading: Reading, tally: Tally) -> Iterator[Document | Reject]:
    field = reading.field
    if not reading.records and reading.template is None and field in batch.schema.names:
        values = _column(batch.column(field))
        take = lambda value: as_text(value, field)  # noqa: E731
    else:
        values, take = _records(batch), taker(reading)
    for value in values:
        tally.counts.lines += 1
        yield tally.take(take, value, tally.counts.lines)


def _column(column: Any) -> list[Any]:
    """The values of a column, which is checked first: in a damaged file, offsets may point anywhere. Unfit stands in
    the place of a value with a string that is no UTF-8."""
    if pa.types.is_dictionary(column.type):
        column.validate(full=True)
        column = column.dictionary_decode()
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        column = column.view(_with_bytes(column.type))
        column.validate(full=True)
        return [_decoded(value) for value in column.to_pylist()]
    return column.to_pylist()


def _records(batch: Any) -> list[Any]:
    """The rows as dicts; Unfit in the place of one with a string that is no UTF-8."""
    names, columns = batch.schema.names, [_column(column) for column in batch.columns]
    records: list[Any] = [{} for _ in range(batch.num_rows)]
    for name, values in zip(names, columns, strict=True):
        for row, value in enumerate(values):
            if isinstance(value, Unfit):
                records[row] = value
            elif not isinstance(records[row], Unfit):
                records[row][name] = value
    return records


def _decoded(value: Any) -> Any:
    """`value` with strings in the place of bytes; Unfit if they are no UTF-8."""
    try:
        return _strings(value)
    except UnicodeDecodeError:
        return Unfit("invalid UTF-8")


def _strings(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, dict):
        return {key: _strings(part) for key, part in value.items()}
    return [_strings(part) for part in value] if isinstance(value, list) else value


def _with_bytes(kind: Any) -> Any:
    """The type with bytes in the place of strings, at any depth."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_with_bytes(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_with_bytes(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_with_bytes(kind.value_type)))
    return kind

"""What the tests of sources share."""

import gzip
import json

import pyarrow as pa
import zstandard

from weft.data.documents import Counts, Document, Reject
from weft.data.sources import Reading, find_files, plan, read

TEXTS = ["one", "", "two words\r\nand a line", 'né "quoted", 日本語 🎉', "x" * 3000, " ", "last"]


def collect(path, reading=None, range_bytes=64 << 20):
    """All items with the file's lines, and the counts, of which the invariants are checked."""
    reading = reading or Reading()
    items, total, sizes = [], Counts(), 0
    for unit in plan(find_files([path]), reading, range_bytes):
        seen, told = Counts(), []
        before = total.lines
        for item in read(unit, reading, seen, told.append):
            items.append(item if item.line is None else item._replace(line=item.line + before))
        assert sum(told) == seen.raw_bytes
        sizes += unit.size
        total.add(seen)
    assert total.documents == sum(isinstance(item, Document) for item in items)
    assert sum(total.rejected.values()) == sum(isinstance(item, Reject) for item in items)
    assert sizes == path.stat().st_size
    return items, total


def values(path, reading=None):
    items, counts = collect(path, reading)
    assert not counts.rejected
    return [item.value for item in items]


def reasons(items):
    return [(item.line, item.reason) for item in items if isinstance(item, Reject)]


def packed(path, data, kind):
    path = path.with_name(path.name + kind)
    path.write_bytes(gzip.compress(data) if kind == ".gz" else zstandard.compress(data) if kind else data)
    return path


def json_lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def make_table():
    return pa.table(
        {"id": list(range(len(TEXTS))), "text": TEXTS, "meta": [{"title": f"t{i}"} for i, _ in enumerate(TEXTS)]}
    )

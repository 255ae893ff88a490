"""Sources: every kind of file gives its documents in order, whole or cut in units, and counts add up."""

import csv
import hashlib
import io
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_cases import TEXTS, collect, json_lines, make_table, packed, reasons, values

from weft.cli.data.inputs import unescape
from weft.data.documents import Counts, Document
from weft.data.sources import Reading, plan, read, streams
from weft.errors import UserError


@pytest.mark.parametrize("kind", ["", ".gz", ".zst"])
def test_every_kind_of_file_gives_the_same_texts(tmp_path, kind):
    records = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    rows = io.StringIO(newline="")
    csv.writer(rows).writerows([["id", "text"], *([r["id"], r["text"]] for r in records)])
    tabs = io.StringIO(newline="")
    csv.writer(tabs, delimiter="\t").writerows([["id", "text"], *([r["id"], r["text"]] for r in records)])
    files = {
        "a.jsonl": json_lines(records),
        "a.ndjson": json_lines(records).replace(b"\n", b"\r\n"),
        "a.json": json.dumps(records, indent=2).encode(),
        "lines.json": json_lines(records),
        "many.json": "\n".join(json.dumps(r, indent=1) for r in records).encode(),
        "a.csv": rows.getvalue().encode(),
        "a.tsv": tabs.getvalue().encode(),
    }
    for name, data in files.items():
        assert values(packed(tmp_path / name, data, kind)) == TEXTS, name
        assert values(packed(tmp_path / name, streams.BOM + data, kind)) == TEXTS, f"{name} with a mark"
    path = packed(tmp_path / "a.txt", streams.BOM + TEXTS[3].encode(), kind)
    assert collect(path)[0] == [Document(TEXTS[3], None)]


def test_tables_give_the_same_texts_in_all_their_forms(tmp_path):
    table = make_table()
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    for name, new in (("file.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with pa.OSFile(str(tmp_path / name), "wb") as out, new(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    large = table.set_column(1, "text", table["text"].cast(pa.large_string()).dictionary_encode())
    pq.write_table(large, tmp_path / "large.parquet")
    pq.write_table(table.set_column(1, "text", table["text"].cast(pa.binary())), tmp_path / "binary.parquet")
    for path in sorted(tmp_path.iterdir()):
        assert values(path) == TEXTS, path.name
        assert values(path, Reading(field="meta.title")) == [f"t{i}" for i, _ in enumerate(TEXTS)], path.name
        assert values(path, Reading(template="{meta.title}: {text}{{}}"))[0] == "t0: one{}"
        assert values(path, Reading(records=True))[1]["id"] == 1
        items, counts = collect(path, Reading(field="content"))
        assert counts.rejected == {"no field 'content'": len(TEXTS)}
        assert "'text'" in items[0].hint
    whole, counts = collect(tmp_path / "a.parquet", range_bytes=1)
    assert len(plan([tmp_path / "a.parquet"], Reading(), 1)) == 4
    assert [item.line for item in whole] == list(range(1, len(TEXTS) + 1))
    assert [item.value for item in whole] == TEXTS
    assert counts.raw_bytes == (tmp_path / "a.parquet").stat().st_size


def test_ranges_of_any_size_give_the_documents_of_the_whole_file(tmp_path):
    rng = random.Random(0)
    bad = [b'{"text": null}', b'{"text": "\xff"}', b"{", b"", b"  ", b"\r", b"[1]", b'{"text": "x", "n": NaN}']
    for number in range(12):
        lines = [json_lines([{"text": "é" * rng.randrange(30)}])[:-1] for _ in range(rng.randrange(12))]
        lines += rng.choices(bad, k=rng.randrange(6))
        rng.shuffle(lines)
        data = rng.choice([b"", streams.BOM]) + b"\n".join(lines) + rng.choice([b"", b"\n", b"\n\n"])
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(data)
        whole, counts = collect(path)
        assert counts.lines == counts.documents + counts.blank_lines + sum(counts.rejected.values())
        assert counts.lines == len(data.splitlines()) if b"\r" not in data else True
        for size in (1, 2, 3, 7, 16, 61, len(data) or 1):
            items, again = collect(path, range_bytes=size)
            assert (items, again.lines, again.raw_bytes) == (whole, counts.lines, len(data)), (number, size)
            assert again == counts


def test_a_units_digest_is_that_of_its_bytes(tmp_path):
    data = json_lines([{"text": text} for text in TEXTS])
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    for unit in plan([path], Reading(), 100):
        counts = Counts()
        list(read(unit, Reading(), counts))
        assert counts.sha256 == hashlib.sha256(data[unit.start : unit.stop]).hexdigest()
    zipped = packed(path, data, ".gz")
    counts = Counts()
    list(read(plan([zipped], Reading())[0], Reading(), counts))
    assert counts.sha256 == hashlib.sha256(zipped.read_bytes()).hexdigest()


def test_fields_within_records_and_templates(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        json_lines(
            [{"a": {"b": "deep", "c": None}, "t": "x"}, {"a.b": "dotted", "t": "y"}, {"a": None, "t": "z"}, {"a": 1}]
        )
    )
    items, _ = collect(path, Reading(field="a.b"))
    assert items[:2] == [("deep", 1), ("dotted", 2)]
    assert reasons(items) == [(3, "field 'a.b' is null"), (4, "no field 'a.b'")]
    items, _ = collect(path, Reading(template="{t}\n{{{a.b}}}"))
    assert items[:2] == [("x\n{deep}", 1), ("y\n{dotted}", 2)]
    assert reasons(items) == [(3, "field 'a.b' is null"), (4, "no field 't'")]
    items, counts = collect(path, Reading(records=True))
    assert [item.value for item in items] == [json.loads(line) for line in path.read_text().splitlines()]
    assert counts.bytes == path.stat().st_size - 4


@pytest.mark.parametrize("template", ["no field", "{}", "{a!r}", "{a:>3}", "{a[0]}", "{a", "a}", ""])
def test_a_template_that_means_nothing_is_refused_at_once(template):
    with pytest.raises(UserError, match="field"):
        Reading(template=template)


def test_arguments_of_a_shell_may_say_line_ends():
    assert unescape(r"{a}\n{b}\t\\n\x\r") == "{a}\n{b}\t\\n\\x\r"
    assert unescape("\\") == "\\"


@pytest.mark.parametrize("separator", ["\n\n", "\n", "<|end|>", "aa"])
@pytest.mark.parametrize("block", [1, 2, 5, 1000])
def test_text_is_split_at_separators_wherever_blocks_end(tmp_path, monkeypatch, separator, block):
    monkeypatch.setattr(streams.UnitReader.read, "__defaults__", (block,))
    text = "first\n\nsecond aaa\n\n\nthird<|end|>\n\n\n\nlaaast é<|end|>" + separator
    path = tmp_path / "a.txt"
    path.write_text(text, newline="")
    items, counts = collect(path, Reading(separator=separator))
    expected = text.removesuffix(separator).split(separator)
    assert [item.value for item in items] == [piece for piece in expected if piece.strip()]
    assert counts.blank_lines == sum(not piece.strip() for piece in expected)
    for item in items:
        begin = text.splitlines(keepends=True)[item.line - 1 :]
        assert "".join(begin).find(item.value) >= 0
    crlf = tmp_path / "b.txt"
    crlf.write_text(text.replace("\n", "\r\n"), newline="")
    again, _ = collect(crlf, Reading(separator=separator))
    assert [item.value.replace("\r\n", "\n") for item in again] == [item.value for item in items]
    assert [item.line for item in again] == [item.line for item in items]

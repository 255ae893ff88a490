"""Sources that are damaged, cut, empty or no text: rejects with line and reason, and never a traceback."""

import gzip
import json
import os
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from source_cases import TEXTS, collect, json_lines, make_table, reasons, values

from weft.cli.main import main
from weft.data.documents import Counts, Document, Reject
from weft.data.sources import Reading, plan, read, streams
from weft.errors import UserError


def test_what_is_no_document_has_a_line_and_a_reason(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "good"}\n\n{"text": null}\n{"t": "x"}\n{"text": 7}\n[1]\n7\n{"text": "\xff"}\n{"text": "cut\n'
        b'{"text": "\\ud800"}\n{"text": ""}\n \t\r\n{"text": "and NaN", "n": NaN}\n' + b'{"a":' * 200_000 + b"\n\0\0\n"
    )
    items, counts = collect(path)
    assert reasons(items) == [
        (3, "field 'text' is null"),
        (4, "no field 'text'"),
        (5, "field 'text' is not text"),
        (6, "not a JSON object"),
        (7, "not a JSON object"),
        (8, "invalid UTF-8"),
        (9, "broken JSON"),
        (10, "a lone surrogate, which UTF-8 cannot encode"),
        (14, "nested too deeply"),
        (15, "broken JSON"),
    ]
    assert [item for item in items if isinstance(item, Document)] == [
        ("good", 1),
        ("", 11),
        ("and NaN", 13),
    ]
    assert (counts.documents, counts.empty, counts.blank_lines, counts.lines, counts.bytes) == (3, 1, 2, 15, 11)


def test_files_that_are_no_text_are_skipped_and_counted(tmp_path):
    for name, data in {
        "a.bin": b"\0\1\2",
        "b.txt": "né".encode("utf-16"),
        "c.csv": b"\0",
        "d.gz": gzip.compress(b"\0"),
    }.items():
        (tmp_path / name).write_bytes(data)
        items, counts = collect(tmp_path / name)
        assert (items, counts.documents) == ([], 0)
        assert counts.skipped_files == {"UTF-16" if name == "b.txt" else "binary": 1}
    (tmp_path / "e.txt").write_bytes(b"fine \xff")
    assert reasons(collect(tmp_path / "e.txt")[0]) == [(None, "invalid UTF-8")]
    (tmp_path / "f.txt").write_text("text")
    assert collect(tmp_path / "f.txt", Reading(records=True))[1].skipped_files == {"text": 1}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv"])
@pytest.mark.parametrize("coding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_counted_whatever_the_format(tmp_path, name, coding):
    data = ("\ufeff" + '{"text": "né"}\n' * 100).encode(coding)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    for range_bytes in (64 << 20, 200):
        items, counts = collect(tmp_path / name, range_bytes=range_bytes)
        assert items == []
        assert counts.skipped_files == {"UTF-16": 1}


def test_valid_json_that_python_finds_too_long_or_too_deep(tmp_path):
    records = ['{"text": "a", "n": ' + "7" * 5000 + "}", '{"n": -' + "1" * 4400 + ', "text": "b"}']
    deep = '{"text": "c", "n": ' + "[" * 200_000 + "]" * 200_000 + "}"
    (tmp_path / "a.jsonl").write_text("\n".join([*records, deep, '{"text": "d"}']))
    items, _ = collect(tmp_path / "a.jsonl")
    assert [item.value for item in items if isinstance(item, Document)] == ["a", "b", "d"]
    assert reasons(items) == [(3, "nested too deeply")]
    (tmp_path / "b.json").write_text("[" + ",\n".join([*records, deep, '{"text": "d"}']) + "]")
    items, _ = collect(tmp_path / "b.json")
    assert [item.value for item in items if isinstance(item, Document)] == ["a", "b"]
    assert reasons(items) == [(None, "nested too deeply")]
    (tmp_path / "c.json").write_text(deep + "\n[]")
    assert reasons(collect(tmp_path / "c.json")[0]) == [(None, "nested too deeply")]


@pytest.mark.parametrize("documents", [3, 20_000])
def test_a_wrong_checksum_costs_no_document(tmp_path, documents):
    texts = [f"{i} " + "abcdefgh"[i % 8] * 20 for i in range(documents)]
    lines = json_lines([{"text": text} for text in texts])
    with gzip.GzipFile(tmp_path / "named", "wb") as file:  # a header with a name in it
        file.write(lines)
    for whole in (gzip.compress(lines), (tmp_path / "named").read_bytes()):
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(whole)
        assert values(path) == texts
        for place in (-8, -1):
            data = bytearray(whole)
            data[place] ^= 1
            path.write_bytes(data)
            items, _ = collect(path)
            assert reasons(items) == [(None, "damaged gzip file: wrong checksum")]
            assert [item.value for item in items[:-1]] == texts
        path.write_bytes(whole[:-3])
        items, _ = collect(path)
        assert reasons(items) == [(None, "truncated gzip file")]
        assert [item.value for item in items[:-1]] == texts


def test_of_an_arrow_file_without_its_end_the_whole_batches_are_read(tmp_path):
    table = make_table()
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    whole = path.read_bytes()
    assert values(path) == TEXTS
    for cut, least in ((5, 7), (len(whole) // 3, 3)):
        path.write_bytes(whole[:-cut])
        items, _ = collect(path)
        assert reasons(items) == [(None, "broken arrow file")]
        assert [item.value for item in items[:-1]] == TEXTS[: len(items) - 1]
        assert len(items) > least


def test_empty_files(tmp_path):
    expected = {
        "a.jsonl": [],
        "a.json": [],
        "a.csv": [],
        "a.txt": [Document("", None)],
        "a.jsonl.gz": [],
        "a.jsonl.zst": [],
    }
    for name, items in expected.items():
        (tmp_path / name).write_bytes(b"")
        assert collect(tmp_path / name)[0] == items, name
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(b"")
        assert reasons(collect(tmp_path / name)[0]) == [(None, f"empty {name[2:]} file")]
    (tmp_path / "b.json").write_text(" [ ]\n")
    assert collect(tmp_path / "b.json")[0] == []


@pytest.mark.parametrize("kind", [".gz", ".zst"])
def test_packed_files_of_many_parts_and_cut_or_damaged_ones(tmp_path, kind):
    compress = gzip.compress if kind == ".gz" else zstandard.compress
    texts = ["".join(random.Random(i).choices("abcdefgh ", k=2000)) for i in range(400)]
    lines = json_lines([{"text": text} for text in texts])
    half = len(lines) // 2
    whole = compress(lines[:half]) + compress(lines[half:])
    path = tmp_path / f"a.jsonl{kind}"
    path.write_bytes(whole)
    assert values(path) == texts
    name = "gzip" if kind == ".gz" else "zstd"
    for data, reason in (
        (whole[:-1], f"truncated {name} file"),
        (whole[: len(whole) * 3 // 4], f"truncated {name} file"),
        (whole + b"garbage", f"damaged {name} file"),
        (compress(lines[:half]) + b"\x55" * 40, f"damaged {name} file"),
        (b"no such thing at all", f"damaged {name} file"),
    ):
        path.write_bytes(data)
        items, _ = collect(path)
        assert reasons(items) == [(None, reason)]
        assert isinstance(items[-1], Reject)
        assert [item.value for item in items[:-1]] == texts[: len(items) - 1]
        if data[: len(whole) // 2] == whole[: len(whole) // 2]:
            assert len(items) > 100
    if kind == ".gz":
        path.write_bytes(whole + b"\0" * 512)  # padding
        assert values(path) == texts


def test_damaged_tables_and_lists_are_rejects(tmp_path):
    table = make_table()
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    for name, cut in (("a.parquet", 30), ("a.arrow", 600)):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-cut])
        items, _ = collect(path)
        assert reasons(items)[-1] == (None, f"broken {name[2:]} file")
        assert [item.value for item in items[:-1]] == TEXTS[: len(items) - 1]
    for text, documents in (
        ('[{"text": "a"}, {"text": "b"}', 2),
        ('[{"text": "a"}, {"text": "b', 1),
        ('[{"text": "a"} {"text": "b"}]', 1),
        ('[{"text": "a"}] and more', 1),
        ('[{"text": "a"},]', 1),
    ):
        (tmp_path / "a.json").write_text(text)
        items, counts = collect(tmp_path / "a.json")
        assert counts.documents == documents
        assert "broken JSON" in items[-1].reason
        assert items[-1].line is None
    (tmp_path / "b.json").write_bytes(b'[{"text": "a"}, {"text": "\xff"}, 5, {"text": "c"}]')
    items, _ = collect(tmp_path / "b.json")
    assert reasons(items) == [(2, "invalid UTF-8"), (3, "not a JSON object")]


def test_random_damage_is_never_more_than_rejects(tmp_path):
    rng, table = random.Random(0), make_table()
    lines = json_lines([{"text": text} for text in TEXTS])
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    for name, new in (("file.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with pa.OSFile(str(tmp_path / name), "wb") as out, new(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    whole |= {"a.jsonl": lines, "a.jsonl.gz": gzip.compress(lines), "a.jsonl.zst": zstandard.compress(lines)}
    whole |= {"a.json": b"[" + b",".join(lines.split(b"\n")[:-1]) + b"]", "a.csv": b'text,n\n"a\nb",1\n' * 9}
    for name, data in whole.items():
        for _ in range(60):
            damaged = bytearray(data)
            for _ in range(rng.choice([1, 1, 4])):
                at = rng.randrange(len(damaged) - 1)
                damaged[at : at + rng.choice([0, 1, 1, 9])] = rng.choice([b"", b"\xff", b"\0", b'"', b"\n", b"\x7f"])
            (tmp_path / name).write_bytes(damaged)
            for reading in (Reading(), Reading(template="{meta.title}{text}"), Reading(records=True)):
                collect(tmp_path / name, reading, range_bytes=rng.choice([100, 1 << 20]))


def test_parquet_strings_that_are_no_utf8_are_rejected_row_by_row(tmp_path):
    raw = pa.array([b"good", b"\xff", None, b"fine"])
    table = pa.table({"text": raw.view(pa.string()), "id": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "a.parquet")
    for reading in (Reading(), Reading(template="{text}")):
        items, _ = collect(tmp_path / "a.parquet", reading)
        assert reasons(items) == [(2, "invalid UTF-8"), (3, "field 'text' is null")]
        assert [item.value for item in items if isinstance(item, Document)] == ["good", "fine"]


def test_rows_of_csv_that_do_not_fit_are_reported(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'text,n\r\n"two\nlines",1\r\n\r\nalone\r\n"bad"x,2\r\n\xff,3\r\n,4\r\nok,5\r\n"never closed,6\r\nlost,7\r\n'
    )
    items, counts = collect(path)
    assert [item for item in items if isinstance(item, Document)] == [("two\nlines", 2), ("", 8), ("ok", 9)]
    assert reasons(items) == [
        (5, "not as many cells as the header"),
        (6, "broken CSV"),
        (7, "invalid UTF-8"),
        (10, "broken CSV"),
    ]
    assert (items[-1].last, items[-1].hint) == (11, "unexpected end of data, lines 10 to 11")
    assert counts.blank_lines == 1


def test_a_quote_that_never_closes_says_up_to_where(tmp_path, monkeypatch, capsys, tiny_tokenizer):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text('text\na\n"b\n' + "c\n" * 40)
    pack = ["data", "pack", "a.csv", "--tokenizer", str(tiny_tokenizer), "--out", "s"]
    assert main(pack) == 2
    assert "a.csv:3: broken CSV (unexpected end of data, lines 3 to 43); fix the input" in capsys.readouterr().err
    assert main([*pack, "--on-error", "skip"]) == 0
    assert [json.loads(line) for line in (tmp_path / "s" / "rejects.jsonl").read_text().splitlines()] == [
        {"path": "a.csv", "line": 3, "last_line": 43, "reason": "broken CSV"}
    ]


def test_a_line_and_a_cell_of_a_hundred_megabytes(tmp_path):
    big = "many words " * (100_000_000 // 11)
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(json_lines([{"text": "before"}, {"text": big}, {"text": "after"}]))
    for size in (64 << 20, 30 << 20):
        items, _ = collect(lines, range_bytes=size)
        assert [(len(item.value), item.line) for item in items] == [(6, 1), (len(big), 2), (5, 3)]
        assert items[1].value == big


def test_what_is_longer_than_any_document_may_be_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "LONGEST", 4 << 20)
    long = "x" * (5 << 20)
    (tmp_path / "a.jsonl").write_bytes(json_lines([{"text": "before"}, {"text": long}, {"text": "after"}]))
    items, _ = collect(tmp_path / "a.jsonl")
    assert [item.line for item in items] == [1, 2, 3]
    assert reasons(items) == [(2, "longer than 4 MiB")]
    (tmp_path / "a.txt").write_text(long)
    items, _ = collect(tmp_path / "a.txt")
    assert reasons(items) == [(None, "longer than 4 MiB")]
    assert "--separator" in items[0].hint
    (tmp_path / "a.json").write_bytes(b"[" + json_lines([{"text": long * 3}]) + b"]")
    assert reasons(collect(tmp_path / "a.json")[0]) == [(None, "longer than 4 MiB")]


def test_a_file_that_changes_or_is_gone_is_the_users_to_mend(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines([{"text": "x"}] * 9))
    units = plan([path], Reading(), 50)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="changed"):
        list(read(units[1], Reading(), Counts()))
    text = tmp_path / "a.txt"
    text.write_text("x")
    whole = plan([text], Reading())
    text.write_text("xy")
    with pytest.raises(UserError, match="changed"):
        list(read(whole[0], Reading(), Counts()))
    path.unlink()
    for unit in (units[0], *plan([path], Reading())):
        assert reasons(list(read(unit, Reading(), Counts()))) == [(None, "cannot be read: No such file or directory")]


def test_what_cannot_be_read_ends_a_pack_or_is_counted_and_named(tmp_path, monkeypatch, capsys, tiny_tokenizer):
    monkeypatch.chdir(tmp_path)
    corpus = tmp_path / "corpus"
    (corpus / "locked").mkdir(parents=True)
    (corpus / "locked" / "inside.txt").write_text("b")
    (corpus / "a.jsonl").write_bytes(json_lines([{"text": "a"}]))
    (corpus / "b.jsonl").write_bytes(json_lines([{"text": "b"}]))
    (corpus / "c.parquet").write_bytes(b"PAR1")
    (corpus / "d.jsonl.gz").write_bytes(b"no gzip")
    (corpus / "e.txt").write_bytes(b"\xff")
    (corpus / "f.bin").write_bytes(b"\0")

    def refusing(real):  # a test may run as root, who may read everything
        def call(path, *args, **options):
            if str(path).endswith(("b.jsonl", "locked")):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *args, **options)

        return call

    monkeypatch.setattr(os, "scandir", refusing(os.scandir))
    monkeypatch.setattr("builtins.open", refusing(open))
    pack = ["data", "pack", "corpus", "--tokenizer", str(tiny_tokenizer), "--out", "s", "--workers", "1"]
    assert main(pack) == 2
    told = capsys.readouterr().err
    assert "corpus/b.jsonl: cannot be read: Permission denied; fix the input, or use --on-error skip" in told
    assert main([*pack, "--on-error", "skip"]) == 0
    said = capsys.readouterr()
    assert "6 documents = 1 packed" in said.out
    assert "skipped 1 binary (corpus/f.bin)" in said.err
    rejects = [json.loads(line) for line in (tmp_path / "s" / "rejects.jsonl").read_text().splitlines()]
    assert [(reject["path"], reject["reason"]) for reject in rejects] == [
        ("corpus/b.jsonl", "cannot be read: Permission denied"),
        ("corpus/c.parquet", "broken parquet file"),
        ("corpus/d.jsonl.gz", "damaged gzip file"),
        ("corpus/e.txt", "invalid UTF-8"),
        ("corpus/locked", "cannot be read: Permission denied"),
    ]
    sources = json.loads((tmp_path / "s" / "store.json").read_text())["sources"]
    assert [source["path"] for source in sources if source.get("skipped") == "binary"] == ["corpus/f.bin"]
    assert main(["data", "verify", "s"]) == 0


def test_a_mark_before_utf8_is_no_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    for name, content in (
        ("a.txt", b"text"),
        ("a.jsonl", b'{"text": "text"}\n'),
        ("b.json", b'[{"text": "text"}]'),
        ("c.json", b'{"text": "text"}\n'),
        ("a.csv", b"text\ntext\n"),
    ):
        (tmp_path / name).write_bytes(mark + content)
        assert values(tmp_path / name) == ["text"], name


@pytest.mark.parametrize("escape", [r"\ud800", r"\udc80", r"\udfff"])
def test_a_lone_surrogate_is_called_one(tmp_path, escape):
    (tmp_path / "a.jsonl").write_text('{"text": "' + escape + '"}\n')
    assert reasons(collect(tmp_path / "a.jsonl")[0]) == [(1, "a lone surrogate, which UTF-8 cannot encode")]


def test_a_field_without_a_name_is_refused(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"": "text"}\n')
    assert main(["data", "pack", str(tmp_path / "a.jsonl"), "--tokenizer", "t", "--field", "", "--out", "o"]) == 2
    assert "--field ''" in capsys.readouterr().err


def test_a_file_name_cannot_break_the_line(tmp_path, capsys):
    path = tmp_path / "two\nlines\x1b[31m.jsonl"
    path.write_text("{")
    assert main(["data", "train-tokenizer", str(path), "--vocab-size", "300", "--out", str(tmp_path / "t")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert r"two\nlines\x1b[31m.jsonl:1: broken JSON" in last

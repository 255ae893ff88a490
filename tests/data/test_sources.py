"""Sources: every kind of file, whole or damaged, gives its documents in order, or says why not, and counts add up."""

import csv
import gzip
import hashlib
import io
import json
import random
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from weft.cli.data.inputs import unescaped
from weft.cli.main import main
from weft.config.errors import UserError
from weft.data.documents import Counts, Document, Reject
from weft.data.sources import Reading, find_files, plan, read, read_all, streams

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


@pytest.fixture
def table():
    return pa.table(
        {"id": list(range(len(TEXTS))), "text": TEXTS, "meta": [{"title": f"t{i}"} for i, _ in enumerate(TEXTS)]}
    )


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


def test_tables_give_the_same_texts_in_all_their_forms(tmp_path, table):
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


def test_what_is_no_document_has_a_line_and_a_reason(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "good"}\n\n{"text": null}\n{"t": "x"}\n{"text": 7}\n[1]\n7\n{"text": "\xff"}\n{"text": "cut\n'
        b'{"text": "\\ud800"}\n{"text": ""}\n \t\r\n{"text": "and NaN", "n": NaN}\n' + b'{"a":' * 2000 + b"\n\0\0\n"
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
        (10, "a lone surrogate, which UTF-8 cannot hold"),
        (14, "broken JSON"),
        (15, "broken JSON"),
    ]
    assert [item for item in items if isinstance(item, Document)] == [
        ("good", 1),
        ("", 11),
        ("and NaN", 13),
    ]
    assert (counts.documents, counts.empty, counts.blank_lines, counts.lines, counts.bytes) == (3, 1, 2, 15, 11)


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
    assert unescaped(r"{a}\n{b}\t\\n\x\r") == "{a}\n{b}\t\\n\\x\r"
    assert unescaped("\\") == "\\"


@pytest.mark.parametrize("separator", ["\n\n", "\n", "<|end|>", "aa"])
@pytest.mark.parametrize("block", [1, 2, 5, 1000])
def test_text_is_split_at_separators_wherever_blocks_end(tmp_path, monkeypatch, separator, block):
    monkeypatch.setattr(streams.Raw.read, "__defaults__", (block,))
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


def test_damaged_tables_and_lists_are_rejects(tmp_path, table):
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


def test_parquet_strings_that_are_no_utf8_are_rejected_row_by_row(tmp_path):
    raw = pa.array([b"good", b"\xff", None, b"fine"])
    table = pa.table({"text": raw.view(pa.string()), "id": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "a.parquet")
    for reading in (Reading(), Reading(template="{text}")):
        items, _ = collect(tmp_path / "a.parquet", reading)
        assert reasons(items) == [(2, "invalid UTF-8"), (3, "field 'text' is null")]
        assert [item.value for item in items if isinstance(item, Document)] == ["good", "fine"]


def test_rows_of_csv_that_do_not_fit_are_told(tmp_path):
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
    assert counts.blank_lines == 1


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


def test_folders_patterns_and_lists_name_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        "d/b.txt",
        "d/a.jsonl",
        "d/sub/c.txt",
        "d/.hidden/x.txt",
        "d/.x.txt",
        "d/a.jsonl.index.npy",
        "e.txt",
        "d/a.jsonl.index.json",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "d" / "link").symlink_to(tmp_path / "d")  # round in circles

    def found(*inputs, **options):
        return [str(path) for path in find_files(inputs, **options)]

    assert found("e.txt", "d") == ["e.txt", "d/a.jsonl", "d/b.txt", "d/sub/c.txt"]
    assert found("d/*.txt") == ["d/b.txt"]
    assert found("[de]*/**/?.jsonl") == ["d/a.jsonl"]
    assert found("d/s*/c.txt", "d/sub", "d/sub/c.txt") == ["d/sub/c.txt"]
    assert found("d/.x.txt") == ["d/.x.txt"]
    (tmp_path / "list").write_text("d/b.txt\n\ne.txt\r\nd/b.txt\n")
    assert found(files_from="list") == ["d/b.txt", "e.txt"]
    for nothing in ("nowhere", "d/*.none"):
        with pytest.raises(UserError, match=nothing.replace("*", r"\*")):
            find_files([nothing])
    with pytest.raises(UserError, match="no files"):
        find_files([])


def test_a_folder_that_datasets_saved_is_read_in_its_order(tmp_path):
    def save(folder, parts):
        folder.mkdir(parents=True)
        names = []
        for number, texts in enumerate(parts):
            table = pa.table({"text": texts})
            names.append({"filename": f"data-{number}-of-{len(parts)}.arrow"})
            with (
                pa.OSFile(str(folder / names[-1]["filename"]), "wb") as out,
                pa.ipc.new_stream(out, table.schema) as writer,
            ):
                writer.write_table(table)
        (folder / "state.json").write_text(json.dumps({"_data_files": names, "_fingerprint": "x"}))
        (folder / "dataset_info.json").write_text("{}")
        (folder / "cache-1.arrow").write_bytes((folder / names[0]["filename"]).read_bytes())

    parts = [[f"{i}"] for i in range(11)]
    save(tmp_path / "saved" / "train", parts)
    save(tmp_path / "saved" / "test", [["held out"]])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    files = find_files([tmp_path / "saved" / "train"])
    texts = [document.value for document in read_all(files, Reading(), Counts())]
    assert texts == [str(i) for i in range(11)]
    assert len(find_files([tmp_path / "saved"])) == 12
    assert len(find_files([tmp_path / "saved" / "*"])) == 12
    (tmp_path / "saved" / "train" / "data-3-of-11.arrow").unlink()
    with pytest.raises(UserError, match="data-3-of-11"):
        find_files([tmp_path / "saved"])


@pytest.mark.parametrize("kind", ["", ".gz", ".zst"])
def test_standard_input_is_what_it_is_said_to_be(monkeypatch, tmp_path, kind):
    data = packed(tmp_path / "a", json_lines([{"text": text} for text in TEXTS]), kind).read_bytes()

    def from_stdin(reading):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return list(read_all(find_files(["-"]), reading, Counts()))

    assert [document.value for document in from_stdin(Reading(format="jsonl"))] == TEXTS
    assert from_stdin(Reading())[0].value.startswith('{"text": "one"}')
    with pytest.raises(UserError, match="pipe"):
        from_stdin(Reading(format="parquet"))


def test_a_format_may_be_forced(tmp_path):
    (tmp_path / "a.data").write_bytes(json_lines([{"text": "x"}]))
    assert values(tmp_path / "a.data", Reading(format="jsonl")) == ["x"]
    (tmp_path / "package.json").write_text('{"name": 1}')
    assert values(tmp_path / "package.json", Reading(format="text")) == ['{"name": 1}']
    with pytest.raises(UserError, match="formats are"):
        Reading(format="xml")


def test_a_file_that_shrinks_or_is_gone_is_the_users_to_mend(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines([{"text": "x"}] * 9))
    units = plan([path], Reading(), 50)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="shorter"):
        list(read(units[1], Reading(), Counts()))
    path.unlink()
    with pytest.raises(UserError, match="No such file"):
        list(read(units[0], Reading(), Counts()))
    with pytest.raises(UserError, match="No such file"):
        plan([path], Reading())


def test_a_tokenizer_is_trained_on_templates_of_any_source(tmp_path, capsys):
    rows = [{"title": f"t{i}", "body": f"some text number {i}"} for i in range(50)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json_lines(rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    command = ["data", "train-tokenizer", str(tmp_path), "--vocab-size", "280", "--out", str(tmp_path / "tok")]
    assert main([*command, "--template", r"{title}\n{body}"]) == 0
    assert "from 100 documents" in capsys.readouterr().out
    assert main([*command, "--overwrite"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "a.jsonl.gz:1: no field 'text'" in error
    assert "'title'" in error


@pytest.mark.parametrize("verb", ["pack", "train-tokenizer", "index"])
def test_help_needs_nothing_heavy(verb):
    import subprocess

    program = (
        f"import sys; from weft.cli.main import main; code = main(['data', '{verb}', '--help']); "
        "sys.exit(code or ', '.join({'torch', 'numpy', 'pyarrow'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

"""Which files inputs name, and what they are taken for."""

import gzip
import io
import json
import os
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_cases import TEXTS, json_lines, packed, values

from weft.cli.main import main
from weft.data.documents import Counts
from weft.data.sources import Reading, find_files, read_all
from weft.errors import UserError


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


def test_what_is_no_document_is_counted_by_reason(tmp_path, tiny_tokenizer, tiny_store, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("d/a.txt", "d/.git/config", "d/.git/head", "d/.x.txt", "d/sub/b.txt", "elsewhere/c.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(f"text of {name}")
    Path("d/binary").write_bytes(b"a\0b")
    Path("d/gone.txt").symlink_to("nowhere")
    Path("d/self").symlink_to("self")
    Path("d/linked").symlink_to("../elsewhere")  # is followed
    Path("d/above").symlink_to("..")  # leads to d again
    Path("d/again.txt").symlink_to("a.txt")  # is the same file
    os.mkfifo("d/pipe")
    shutil.copytree(tiny_tokenizer, "d/tok")
    shutil.copytree(tiny_store, "d/store")
    (tmp_path / "d" / "store" / "readme.txt").write_text("mine")
    expected = {"hidden": 2, "dangling link": 2, "pipe or device": 1, "token store": 1, "tokenizer": 1}
    for inputs in (["d"], ["d/", "d", "./d/a.txt", str(tmp_path / "d"), "elsewhere/../d"]):
        files = find_files(inputs)
        names = [str(path.relative_to(tmp_path) if path.is_absolute() else path) for path in files]
        assert sorted({Path(name).name for name in names}) == ["a.txt", "b.txt", "binary", "c.txt", "readme.txt"]
        assert len(names) == 5
        assert files.skipped == expected
        assert find_files(files) is files
    assert find_files(["d", "d/.x.txt"]).skipped["hidden"] == 1
    assert find_files(["d/*"]).skipped["dangling link"] == 2
    assert len(find_files(["d/*"])) == 5
    (tmp_path / "d" / "store" / "readme.txt").unlink()
    with pytest.raises(UserError, match=r"no files in d/store \(1 token store skipped\)"):
        find_files(["d/store"])

    out = ["--out", "d/new", "--tokenizer", "d/tok"]
    assert main(["data", "pack", "d", *out]) == 0
    line = next(line for line in capsys.readouterr().err.splitlines() if "skipped" in line)
    assert "2 hidden" in line
    assert "1 binary" in line
    stored = json.loads(Path("d/new/store.json").read_text())
    assert stored["skipped_files"] == expected | {"binary": 1}
    assert [source["path"] for source in stored["sources"] if source["documents"]] == sorted(
        ["d/a.txt", "d/above/elsewhere/c.txt", "d/sub/b.txt"]
    )
    shards = []
    for number in (1, 2):
        shards.append(f"shard{number}")
        assert main(["data", "pack", "d", "--tokenizer", "d/tok", "--shard", f"{number}/2", "--out", shards[-1]]) == 0
    assert main(["data", "merge", *shards, "--out", "merged"]) == 0
    merged = json.loads(Path("merged/store.json").read_text())["skipped_files"]
    assert merged == expected | {"binary": 1, "token store": 2}
    capsys.readouterr()
    assert main(["data", "train-tokenizer", "d", "--vocab-size", "260", "--out", "tok2"]) == 0
    assert "1 tokenizer" in capsys.readouterr().err


def test_a_path_through_a_link_is_not_taken_for_another_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x.txt", "far/off/y.txt", "far/x.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    Path("link").symlink_to("far/off")
    assert [path.read_text() for path in find_files(["x.txt", "link/../x.txt"])] == ["x.txt", "far/x.txt"]


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
    with pytest.raises(UserError, match=r"'xml'.*arrow, csv, json"):
        values(tmp_path / "a.data", Reading(format="xml"))


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

"""Which files inputs name, and what they are taken for."""

import gzip
import io
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_cases import TEXTS, json_lines, packed, values

from weft.cli.main import main
from weft.config.errors import UserError
from weft.data.documents import Counts
from weft.data.sources import Reading, find_files, read_all


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

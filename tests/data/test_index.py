"""The index of a JSON-lines file: every document at its offset, whole or not at all, and told when it is stale."""

import json
import os
import pickle
import random

import numpy as np
import pytest

from weft.cli.main import main
from weft.data.sources import index
from weft.data.sources.index import JsonLines, build_index, index_path, is_current
from weft.errors import UserError


def write(path, data):
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 1 << 20])
def test_documents_are_the_lines_that_are_not_blank_whatever_the_chunks(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(index, "CHUNK", chunk)
    rng = random.Random(0)
    for number in range(30):
        lines = [json.dumps({"text": "é" * rng.randrange(9), "n": i}).encode() for i in range(rng.randrange(9))]
        lines += rng.choices([b"", b" ", b"\t \r", b"\r", b'  {"n": -1}  \r'], k=rng.randrange(9))
        rng.shuffle(lines)
        end = rng.choice([b"", b"\n", b" \n \n"])
        path = write(tmp_path / f"{number}.jsonl", b"\n".join(lines) + end)
        expected = [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]
        assert build_index(path) == len(expected)
        records = JsonLines(path)
        assert [records[i] for i in range(len(records))] == expected == list(records)
        offsets = np.load(index_path(path), allow_pickle=False)
        assert offsets.dtype == np.uint64
        assert offsets[-1] == path.stat().st_size
        assert [path.read_bytes()[o : o + 1] in b"{ " for o in offsets[:-1].tolist()] == [True] * len(expected)


def test_records_by_number_from_anywhere(tmp_path):
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"n": 0}\n{"n": 1}\r\n\n{"n": NaN}\n{broken\n{"n": 4}')
    build_index(path)
    records = JsonLines(path)
    assert len(records) == 5
    assert records[0] == {"n": 0}
    assert records[-1] == records[4] == {"n": 4}
    assert np.isnan(records[2]["n"])
    assert records.raw(1) == b'{"n": 1}\r\n\n'
    for number in (5, -6):
        with pytest.raises(IndexError):
            records[number]
    with pytest.raises(UserError, match="document 3 is not valid JSON"):
        records[3]
    assert pickle.loads(pickle.dumps(records))[1] == {"n": 1}


def test_a_stale_or_missing_or_damaged_index_is_reported(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"n": 0}\n{"n": 1}\n')
    with pytest.raises(UserError, match=r"weft data index .*a.jsonl"):
        JsonLines(path)
    assert not is_current(path)
    build_index(path)
    assert is_current(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(UserError, match="has changed"):
        JsonLines(path)
    build_index(path)
    with open(path, "ab") as file:
        file.write(b'{"n": 2}\n')
    with pytest.raises(UserError, match="has changed"):
        JsonLines(path)
    build_index(path)
    index_path(path).write_bytes(index_path(path).read_bytes()[:-8])
    with pytest.raises(UserError, match="weft data index"):
        JsonLines(path)
    np.save(index_path(path), np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="weft data index"):
        JsonLines(path)


def test_a_build_that_fails_leaves_no_index(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", b'{"n": 0}\n' * 100)
    build_index(path)

    def killed(more):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(path, killed)
    assert not is_current(path)
    assert not [p.name for p in tmp_path.iterdir() if "partial" in p.name]

    def grow(more):
        with open(path, "ab") as file:
            file.write(b"{}\n")

    with pytest.raises(UserError, match="changed while"):
        build_index(path, grow)
    assert not is_current(path)


def test_the_verb_indexes_many_files_and_knows_what_is_done(tmp_path, capsys):
    files = [write(tmp_path / f"{name}.jsonl", b'{"n": 0}\n\n' * 10) for name in "ab"]
    assert main(["data", "index", str(tmp_path)]) == 0
    assert "a.jsonl.index.npy: 10 documents" in capsys.readouterr().out
    write(files[1], b"{}\n")
    assert main(["data", "index", str(tmp_path / "*.jsonl")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "up to date" in said[0]
    assert said[1].endswith("1 document")
    assert len(JsonLines(files[1])) == 1
    for name, data, told in (
        ("c.txt", b"x", "not JSON lines"),
        ("c.jsonl.gz", b"x", "decompress it"),
        ("c.json", b"[\n]", "not JSON lines"),
    ):
        assert main(["data", "index", str(write(tmp_path / name, data))]) == 2
        assert told in capsys.readouterr().err

"""Damage is found, and where; a look at a store is short."""

import json
import re
import shutil
import struct

import numpy as np
import pytest
from store_cases import EOD, make_store

from weft.cli.main import main
from weft.data.inspect import sample_array
from weft.data.stores.operations.verify import verify
from weft.data.stores.store_json import write_store_json
from weft.errors import UserError


def make(folder, **changes):
    chooser = np.random.default_rng(0)
    texts = [[*chooser.integers(1, 500, length).tolist(), EOD] for length in (5, 0, 9, 30, 7, 7)]
    texts[0][0] = 499
    tokens = np.concatenate(texts)
    if "mask" in changes:
        changes["mask"] = tokens > 250
    return make_store(folder, [len(t) for t in texts], tokens=tokens, dtype=np.uint16, **changes)


def change(path, offset, form, value):
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, offset, value)
    path.write_bytes(data)


IDX = 34  # where its lengths begin; then 4 bytes a length, 8 an offset, 8 a boundary
DAMAGE = {
    "a flipped bit": (lambda s: change(s / "tokens.bin", 4, "<H", 3), "tokens.bin: its bytes were changed"),
    "an id outside": (
        lambda s: change(s / "tokens.bin", 16, "<H", 700),
        "document 2, token 1 is 700, outside the vocab",
    ),
    "a lost end": (lambda s: change(s / "tokens.bin", 12, "<H", 9), "document 1 does not end with"),
    "lengths that moved": (
        lambda s: (change(s / "tokens.idx", IDX, "<i", 7), change(s / "tokens.idx", IDX + 4, "<i", 0)),
        "document 1: has no end-of-document token",
    ),
    "an offset": (lambda s: change(s / "tokens.idx", IDX + 24 + 8, "<q", 2), "document 1: its offset"),
    "a boundary": (lambda s: change(s / "tokens.idx", IDX + 24 + 48 + 16, "<q", 9), "document 2: its boundary"),
    "a mask of twos": (lambda s: change(s / "loss_mask.bin", 8, "B", 2), "document 2, token 1 is neither 0 nor 1"),
    "a mask bit": (lambda s: change(s / "loss_mask.bin", 0, "B", 0), "loss_mask.bin: its bytes were changed"),
    "a cut file": (
        lambda s: (s / "tokens.bin").write_bytes(b"12"),
        "tokens.bin: damaged: it has 2 bytes instead",
    ),
}


@pytest.mark.parametrize(("damage", "told"), DAMAGE.values(), ids=list(DAMAGE))
def test_verify_says_what_is_wrong_where(tmp_path, capsys, damage, told):
    make(tmp_path / "s", mask=True, kind="conversations")
    assert main(["data", "verify", str(tmp_path / "s")]) == 0
    assert "every byte is as it was written" in capsys.readouterr().out
    damage(tmp_path / "s")
    assert main(["data", "verify", str(tmp_path / "s")]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert "damaged" in said.out
    assert "Traceback" not in said.err


def test_wrong_totals_and_several_stores(tmp_path, capsys):
    make(tmp_path / "a")
    make(tmp_path / "b")
    for name, empty in (("a", 1), ("b", 4)):
        content = json.loads((tmp_path / name / "store.json").read_text())
        write_store_json(tmp_path / name, content | {"empty_documents": empty})
    assert main(["data", "verify", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    said = capsys.readouterr()
    assert "empty_documents is 4, but the store has 1 empty document" in said.err
    assert "a: every byte" in said.out
    assert main(["data", "verify", str(tmp_path / "none")]) == 2
    assert "no such token store" in capsys.readouterr().err


@pytest.fixture(scope="module")
def packed(tmp_path_factory, tiny_tokenizer):
    """A store of two documents and two rejects."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "x.jsonl").write_text('{"text": "one"}\nbroken\n{"text": "two"}\n{}\n')
    command = ["data", "pack", str(folder / "x.jsonl"), "--tokenizer", str(tiny_tokenizer), "--on-error", "skip"]
    assert main([*command, "--out", str(folder / "s")]) == 0
    return folder / "s"


def test_any_changed_bit_of_store_json_and_of_the_rejects_is_found(tmp_path, packed):
    assert verify(packed) == []
    assert verify(packed).verdict == "every byte is as it was written"
    store = tmp_path / "s"
    shutil.copytree(packed, store)
    chooser = np.random.default_rng(0)
    for name in ("store.json", "rejects.jsonl"):
        whole = (store / name).read_bytes()
        for place in range(len(whole)):
            data = bytearray(whole)
            data[place] ^= 1 << int(chooser.integers(8))
            (store / name).write_bytes(data)
            assert verify(store), f"{name}: {whole[place - 20 : place + 20]!r} with another {chr(whole[place])!r}"
        for data in (whole + b"\n", whole + b" ", whole[:-1], b" " + whole):
            (store / name).write_bytes(data)
            assert verify(store)
        (store / name).write_bytes(whole)
    assert verify(store) == []


def test_files_that_are_gone_or_too_many_and_totals_that_do_not_add_up_are_reported(tmp_path, packed, capsys):
    store = tmp_path / "s"
    shutil.copytree(packed, store)
    (store / "rejects.jsonl").unlink()
    assert main(["data", "verify", str(store)]) == 2
    assert "rejects.jsonl: is missing, but store.json has its digest" in capsys.readouterr().err
    (store / "rejects.jsonl").write_bytes((packed / "rejects.jsonl").read_bytes())
    (store / "duplicates.jsonl").write_text("{}\n")
    assert any("duplicates.jsonl: exists" in line for line in verify(store))
    (store / "duplicates.jsonl").unlink()
    content = json.loads((store / "store.json").read_text())
    content["rejected"] = {"broken JSON": 5}
    content["sources"][0]["documents"] = 7
    write_store_json(store, content)  # a digest that is right
    told = "\n".join(verify(store))
    assert "rejected is 5, but the sum over its sources is 2" in told
    assert "documents is 2, but the sum over its sources is 7" in told


def test_of_a_store_without_digests_it_is_said_what_was_not_looked_at(tmp_path, packed, capsys):
    store = tmp_path / "s"
    shutil.copytree(packed, store)
    content = json.loads((store / "store.json").read_text())
    del content["digest"], content["rejects_sha256"]
    (store / "store.json").write_text(json.dumps(content))
    assert main(["data", "verify", str(store)]) == 0
    said = capsys.readouterr()
    assert "store.json: has no digest of its content, so its numbers were not checked" in said.err
    assert "every byte of the tokens is as it was written" in said.out


def test_every_verb_that_writes_a_store_writes_one_that_holds(tmp_path, packed, capsys):
    for verb in (["merge", str(packed), str(packed)], ["dedup", str(packed)], ["shuffle", str(packed), "--seed", "1"],
                 ["filter", str(packed), "--min-tokens", "1"]):  # fmt: skip
        assert main(["data", *verb, "--out", str(tmp_path / verb[0])]) == 0
        found = verify(tmp_path / verb[0])
        assert (list(found), found.unchecked) == ([], [])
    (tmp_path / "dedup" / "duplicates.jsonl").write_text("{}\n")
    assert any("duplicates.jsonl" in line for line in verify(tmp_path / "dedup"))
    with open(tmp_path / "merge" / "rejects.jsonl", "ab") as file:
        file.write(b"\n")
    assert len(verify(tmp_path / "merge")) == 2


def test_a_thousand_wrong_places_are_a_few_lines(tmp_path, capsys):
    make_store(tmp_path / "s", [2] * 1000, tokens=np.full(2000, 5))  # none ends with EOD
    assert main(["data", "verify", str(tmp_path / "s")]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "tokens.bin" in line]
    assert len(lines) == 4
    assert "997 more" in lines[-1]


def test_inspect_shows_kind_mask_and_where_a_store_came_from(tmp_path, tiny_store, tiny_tokenizer, capsys):
    make(tmp_path / "s", mask=True, kind="conversations")
    assert main(["data", "shuffle", str(tmp_path / "s"), "--seed", "5", "--out", str(tmp_path / "t")]) == 0
    capsys.readouterr()
    assert main(["data", "inspect", str(tmp_path / "t"), "--samples", "1", "--verify"]) == 0
    out = capsys.readouterr().out
    mask = np.fromfile(tmp_path / "t" / "loss_mask.bin", np.uint8)
    assert "6 documents of conversations, 64 tokens (uint16)" in out
    assert f"loss mask  {mask.mean():.1%} of the tokens" in out
    assert "made by    shuffle of" in out
    assert "seed 5" in out
    assert "every byte is as it was written" in out
    assert main(["data", "inspect", str(tiny_store), "--tokenizer", str(tiny_tokenizer)]) == 0
    assert "####" in capsys.readouterr().out


def test_of_a_large_array_only_some_is_looked_at(monkeypatch):
    import weft.data.inspect as inspecting

    monkeypatch.setattr(inspecting, "SAMPLE_SIZE", 640)
    part, whole = sample_array(np.arange(10**6))
    assert not whole
    assert len(part) == 640
    assert (part.min(), part.max()) == (0, 10**6 - 1)
    assert abs(part.mean() - 5e5) < 1e4


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("dtype", "foo", "dtype: 'foo', but tokens.idx has int32"),
        ("dtype", "uint16", "dtype: 'uint16', but tokens.idx has int32"),
        ("tokens", "many", "tokens: 'many' is not a non-negative integer"),
        ("documents", -1, "documents: -1"),
        ("vocab_size", 2.5, "vocab_size: 2.5"),
        ("eod_id", True, "eod_id: True"),
    ],
)
def test_a_store_that_says_what_is_not_so_is_refused_everywhere(tmp_path, monkeypatch, capsys, key, value, told):
    from weft.headers import read_store_header

    monkeypatch.chdir(tmp_path)
    store = make_store(tmp_path / "s", [3, 4])
    info = json.loads((store.path / "store.json").read_text())
    (store.path / "store.json").write_text(json.dumps({**info, key: value}))
    with pytest.raises(UserError, match=re.escape(f"s/store.json: {told}")):
        read_store_header("s")
    assert main(["data", "inspect", "s"]) == 2
    assert told in capsys.readouterr().err


def test_a_negative_number_of_samples_is_refused(tmp_path, capsys):
    make_store(tmp_path / "s", [3, 4])
    assert main(["data", "inspect", str(tmp_path / "s"), "--samples", "-1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--samples -1" in line
    assert "0 or more" in line
    assert main(["data", "inspect", str(tmp_path / "s"), "--samples", "0"]) == 0

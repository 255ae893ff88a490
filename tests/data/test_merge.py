"""Merging: shards give the bytes of the whole pack, and stores that do not fit are refused."""

import json
import random
import shutil

import numpy as np
import pytest

from weft.cli.main import main
from weft.data.packing.merge import merge
from weft.data.packing.pack import pack
from weft.data.stores.indexed import IndexedWriter
from weft.data.stores.store import TokenStore
from weft.errors import UserError


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder, chooser = tmp_path_factory.mktemp("inputs"), random.Random(3)
    words = ["".join(chooser.choices("abcdeé \n", k=5)) for _ in range(100)]
    for name in ("a", "b"):
        texts = [" ".join(chooser.choices(words, k=chooser.randint(0, 90))) for _ in range(150)]
        lines = [json.dumps({"text": text}) for text in texts]
        lines[10] = lines[-2] = '{"text": null}'
        lines[20] = ""
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return [folder / "a.jsonl", folder / "b.jsonl"]


def packed(inputs, out, tokenizer, shard=None):
    pack(inputs, out, tokenizer, workers=1, on_error="skip", range_bytes=3000, shard=shard)
    return out


@pytest.mark.parametrize("shares", [1, 2, 5, 60])
def test_shards_merge_to_the_bytes_of_the_whole_pack(tmp_path, inputs, tiny_tokenizer, shares):
    whole = packed(inputs, tmp_path / "whole", tiny_tokenizer)
    shards = [packed(inputs, tmp_path / f"{i}", tiny_tokenizer, (i, shares)) for i in range(1, shares + 1)]
    assert main(["data", "merge", *map(str, shards), "--out", str(tmp_path / "merged")]) == 0
    for name in ("tokens.bin", "tokens.idx", "rejects.jsonl"):
        assert (tmp_path / "merged" / name).read_bytes() == (whole / name).read_bytes()
    a, b = (json.loads((path / "store.json").read_text()) for path in (whole, tmp_path / "merged"))
    a.pop("made_from")
    assert a.pop("digest") != b.pop("digest")  # of all that is said, the request too
    assert a == b
    assert all(TokenStore(shard).num_documents < 290 for shard in shards) == (shares > 1)


def test_merging_keeps_every_document_where_it_belongs(tmp_path, inputs, tiny_tokenizer):
    stores = [packed([path], tmp_path / path.stem, tiny_tokenizer) for path in (inputs[1], inputs[0])]
    merge(stores, tmp_path / "merged")
    merged = TokenStore(tmp_path / "merged")
    documents = [store.document(n).tolist() for store in map(TokenStore, stores) for n in range(store.num_documents)]
    assert [merged.document(n).tolist() for n in range(merged.num_documents)] == documents


def with_info(store, folder, **changes):
    shutil.copytree(store, folder)
    info = json.loads((folder / "store.json").read_text())
    (folder / "store.json").write_text(json.dumps(info | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokenizer_digest": "0" * 64}, "another tokenizer"),
        ({"kind": "conversations"}, "another kind"),
        ({"vocab_size": 513}, "another vocabulary"),
        ({"eod_id": 1}, "another end-of-document"),
    ],
)
def test_stores_that_were_packed_otherwise_are_refused(tmp_path, inputs, tiny_tokenizer, capsys, changes, told):
    a = packed(inputs[:1], tmp_path / "a", tiny_tokenizer)
    b = with_info(a, tmp_path / "b", **changes)
    assert main(["data", "merge", str(a), str(b), "--out", str(tmp_path / "merged")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"{b}: has {told}")
    assert not (tmp_path / "merged").exists()


def test_a_damaged_store_is_found_while_merging(tmp_path, inputs, tiny_tokenizer):
    a = packed(inputs[:1], tmp_path / "a", tiny_tokenizer)
    data = bytearray((a / "tokens.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (a / "tokens.bin").write_bytes(data)
    with pytest.raises(UserError, match=r"a/tokens.bin: damaged.*pack the store again"):
        merge([a, a], tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_missing_and_repeated_shards_are_reported(tmp_path, inputs, tiny_tokenizer, capsys):
    shards = {i: packed(inputs, tmp_path / f"{i}", tiny_tokenizer, (i, 3)) for i in (1, 2, 3)}
    command = ["data", "merge", "--overwrite", "--out", str(tmp_path / "merged")]
    for numbers, told in (
        ((1, 2, 3), None),
        ((1, 3), "missing shards: 2 of 3"),
        ((1, 2, 2, 3), "more than once"),
        ((2, 1, 3), "order"),
    ):
        assert main([*command, *(str(shards[number]) for number in numbers)]) == 0
        warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
        assert len(warnings) == (told is not None)
        assert told is None or told in warnings[0]


def test_loss_masks_are_merged_and_blocks_are_crossed(tmp_path, monkeypatch):
    from weft.data.packing import merge as merging
    from weft.data.stores import indexed

    for module in (indexed, merging):
        monkeypatch.setattr(module, "BLOCK_TOKENS", 64)
    chooser = np.random.default_rng(0)
    tokens, masks, stores = [], [], []
    for number in range(2):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        writer = IndexedWriter(folder / "tokens", np.uint16, mask=True)
        lengths = chooser.integers(1, 200, 30)
        tokens.append(chooser.integers(0, 500, lengths.sum()))
        masks.append(chooser.integers(0, 2, lengths.sum()))
        writer.add(tokens[-1], lengths, masks[-1])
        info = {
            "kind": "conversations", "tokenizer_digest": "d", "vocab_size": 500, "eod_id": 0, "bytes": 1,
            **writer.finish(),
        }  # fmt: skip
        (folder / "store.json").write_text(json.dumps(info))
        stores.append(folder)
    merge(stores, tmp_path / "merged")
    merged = TokenStore(tmp_path / "merged")
    assert np.array_equal(merged.tokens, np.concatenate(tokens))
    assert np.array_equal(merged.loss_mask, np.concatenate(masks))
    assert merged.info.mask_sha256 is not None


@pytest.mark.parametrize("shard", ["0/3", "4/3", "1", "1/x", "-1/3"])
def test_a_shard_that_means_nothing_is_refused(tmp_path, inputs, tiny_tokenizer, capsys, shard):
    command = ["data", "pack", str(inputs[0]), "--tokenizer", str(tiny_tokenizer), "--out", str(tmp_path / "s")]
    assert main([*command, f"--shard={shard}"]) == 2
    assert "I/N" in capsys.readouterr().err

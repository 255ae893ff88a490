"""Other tools' stores, read as they write them and written as they read them; nothing in them is executed."""

import json
import pickle
import struct

import numpy as np
import pytest
import torch
import zstandard
from store_cases import EOD, make_store

from weft.cli.main import main
from weft.data.stores.operations.verify import verify
from weft.data.stores.store import TokenStore

TEXTS = [[5, 6, 7, EOD], [8, EOD], [EOD], [*range(1, 100), EOD], [9, 9, EOD]]


def convert(*arguments) -> int:
    return main(["data", "convert", *map(str, arguments)])


def texts_of(path) -> list[list[int]]:
    store = TokenStore(path)
    return [store.document(i).tolist() for i in range(store.num_documents)]


@pytest.fixture
def ours(tmp_path):
    return make_store(tmp_path / "ours", [len(t) for t in TEXTS], tokens=np.concatenate(TEXTS), dtype=np.uint16).path


@pytest.fixture(scope="module")
def megatron():
    return pytest.importorskip("megatron.core.datasets.indexed_dataset")


# --- Megatron ---


INTEGERS = [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16]


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda dtype: dtype.__name__)
def test_what_megatrons_builder_writes(tmp_path, megatron, dtype):
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "in.bin"), dtype=dtype)
    for number, text in enumerate(TEXTS):
        # Every other document as several sequences; the last one of all without its end.
        cuts = [text[:1], text[1:]] if number % 2 and len(text) > 1 else [text]
        for cut in cuts:
            builder.add_item(torch.tensor(cut))
        builder.end_document()
    builder.add_item(torch.tensor([3, 4]))
    builder.end_document()
    builder.finalize(str(tmp_path / "in.idx"))
    for given in ("in", "in.bin", "in.idx", "."):
        out = tmp_path / f"out-{given.strip('.')}"
        assert convert(tmp_path / given, "--to", "weft", "--vocab-size", 120, "--eod", EOD, "--out", out) == 0
        assert texts_of(out) == [*TEXTS, [3, 4, EOD]]
    assert verify(out) == []
    info = TokenStore(out).info
    assert (info.vocab_size, info.eod_id, info.tokenizer_digest, info.bytes) == (120, EOD, None, None)


def test_megatrons_reader_opens_what_we_write(tmp_path, megatron, ours):
    assert convert(ours, "--to", "megatron", "--out", tmp_path / "m") == 0
    assert convert(tmp_path / "m", "--to", "pbin", "--out", tmp_path / "m.pbin") == 0
    assert convert(tmp_path / "m.pbin", "--to", "megatron", "--vocab-size", 70000, "--out", tmp_path / "wide") == 0
    for prefix, dtype in ((ours / "tokens", np.uint16), (tmp_path / "m", np.uint16), (tmp_path / "wide", np.int32)):
        dataset = megatron.IndexedDataset(str(prefix))
        assert [dataset[i].tolist() for i in range(len(dataset))] == TEXTS
        assert dataset.document_indices.tolist() == list(range(len(TEXTS) + 1))
        assert dataset.index.dtype == dtype


def test_a_multimodal_index_and_broken_ones(tmp_path, megatron, capsys):
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "in.bin"), dtype=np.int32, multimodal=True)
    for text in TEXTS:
        builder.add_item(torch.tensor(text), mode=1)
        builder.end_document()
    builder.finalize(str(tmp_path / "in.idx"))
    make = [tmp_path / "in", "--to", "weft", "--vocab-size", 120, "--eod", EOD, "--out", tmp_path / "out"]
    assert convert(*make) == 0
    assert texts_of(tmp_path / "out") == TEXTS
    capsys.readouterr()
    good = (tmp_path / "in.idx").read_bytes()
    count = len(TEXTS)
    for offset, form, value, told in (
        (17, "B", 7, "the dtype is float32"),
        (34 + 4 * count + 8, "<q", 0, "sequence 1 does not begin"),
        (34 + 12 * count + 8, "<q", 9, "boundaries decrease after boundary 0"),
        (34 + 12 * count + 8 * count, "<q", 4, "have 4 sequences, but the header counts 5"),
        (18, "<Q", 4, "damaged"),
        (0, "B", 0, "MMIDIDX"),
    ):
        data = bytearray(good)
        struct.pack_into(form, data, offset, value)
        (tmp_path / "in.idx").write_bytes(data)
        assert convert(*make, "--overwrite", "--from", "megatron") == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert told in lines[0]


# --- nanoGPT ---


def test_a_nanogpt_stream_is_cut_behind_each_end(tmp_path, ours, monkeypatch):
    np.concatenate(TEXTS).astype(np.uint16).tofile(tmp_path / "train.bin")
    make = [tmp_path / "train.bin", "--to", "weft", "--vocab-size", 100, "--eod", EOD, "--out"]
    assert convert(*make, tmp_path / "a") == 0
    assert texts_of(tmp_path / "a") == TEXTS
    import weft.data.stores.external.nanogpt as nanogpt

    monkeypatch.setattr(nanogpt, "BLOCK_TOKENS", 3)  # documents over the edges of blocks
    assert convert(*make, tmp_path / "b") == 0
    assert (tmp_path / "b" / "tokens.bin").read_bytes() == (tmp_path / "a" / "tokens.bin").read_bytes()
    assert convert(ours, "--to", "nanogpt", "--out", tmp_path / "back.bin") == 0
    assert (tmp_path / "back.bin").read_bytes() == (tmp_path / "train.bin").read_bytes()
    # Without an end it is one document, which is told.
    assert convert(tmp_path / "train.bin", "--to", "megatron", "--out", tmp_path / "one") == 0
    assert struct.unpack_from("<9sQBQQ", (tmp_path / "one.idx").read_bytes())[3] == 1


def test_an_id_outside_of_the_vocabulary_names_its_document(tmp_path, capsys):
    np.array([1, EOD, 2, 3, EOD, 700, EOD], np.uint16).tofile(tmp_path / "train.bin")
    make = [tmp_path / "train.bin", "--to", "weft", "--eod", EOD, "--out", tmp_path / "a"]
    assert convert(*make, "--vocab-size", 512) == 2
    assert "train.bin: document 2 contains the id 700" in capsys.readouterr().err
    assert convert(*make) == 2
    assert "--tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_with_a_tokenizer_the_store_says_whose_it_is_and_how_much_text(tmp_path, tiny_store, tiny_tokenizer):
    assert convert(tiny_store, "--to", "nanogpt", "--out", tmp_path / "train.bin") == 0
    assert convert(tmp_path / "train.bin", "--to", "weft", "--tokenizer", tiny_tokenizer, "--out", tmp_path / "s") == 0
    old, new = TokenStore(tiny_store).info, TokenStore(tmp_path / "s").info
    same = {"tokenizer_digest", "vocab_size", "eod_id", "documents", "tokens", "bytes", "bin_sha256", "idx_sha256"}
    assert new.model_dump(include=same) == old.model_dump(include=same)


# --- Modalities ---


def write_pbin(path, texts, width, protocol=pickle.DEFAULT_PROTOCOL, index=None):
    data = b"".join(number.to_bytes(width, "little") for text in texts for number in text)
    ends = np.cumsum([len(text) * width for text in texts]).tolist()
    pairs = [(end - len(text) * width, len(text) * width) for text, end in zip(texts, ends, strict=True)]
    index = pickle.dumps(pairs, protocol) if index is None else index
    path.write_bytes(len(data).to_bytes(8, "little") + width.to_bytes(4, "little") + data + index)
    return path


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_pbin_of_modalities(tmp_path, width, protocol):
    texts = [*TEXTS, [*range(1, 200), EOD]] * 400  # over 65,536 bytes: all sizes of numbers
    path = write_pbin(tmp_path / "in.pbin", texts, width, protocol)
    assert convert(path, "--to", "weft", "--vocab-size", 200, "--eod", EOD, "--out", tmp_path / "s") == 0
    assert texts_of(tmp_path / "s") == texts
    assert convert(tmp_path / "s", "--to", "pbin", "--out", tmp_path / "back.pbin") == 0
    back = (tmp_path / "back.pbin").read_bytes()
    length, size = int.from_bytes(back[:8], "little"), int.from_bytes(back[8:12], "little")
    index = pickle.loads(back[12 + length :])  # as Modalities does
    assert size == 1
    assert [list(back[12 + start : 12 + start + count]) for start, count in index] == texts


class Evil:
    def __reduce__(self):
        import os

        return os.system, ("touch executed",)


EVIL = {
    "a call": pickle.dumps([(0, 1), Evil()]),
    "a call, oldest protocol": pickle.dumps([Evil()], 0),
    "an object": pickle.dumps([(0, 2), (np.int64(2), 2)]),
    "a text": pickle.dumps(["0", "1"]),
    "a triple": pickle.dumps([(0, 1, 2)]),
    "one pair": pickle.dumps((0, 2)),
    "lists in a list": pickle.dumps([[(0, 2)]]),
    "numbers": pickle.dumps([1, 2]),
    "broken off": pickle.dumps([(0, 2)] * 3)[:-5],
    "too large": pickle.dumps([(1 << 70, 1)]),
    "nothing": b"\x80",
}


@pytest.mark.parametrize("index", EVIL.values(), ids=list(EVIL))
def test_an_index_that_is_more_than_pairs_is_refused_not_run(tmp_path, monkeypatch, capsys, index):
    monkeypatch.chdir(tmp_path)
    write_pbin(tmp_path / "in.pbin", [[1, 2]], 2, index=index)
    assert convert("in.pbin", "--to", "nanogpt", "--out", "out.bin") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("in.pbin: ")
    assert "its index is" in lines[0]
    assert [p.name for p in tmp_path.iterdir()] == ["in.pbin"]


@pytest.mark.parametrize("pairs", [[(0, 8)], [(2, 4)], [(-2, 2)], [(1, 2)]])
def test_an_index_that_points_outside_is_refused(tmp_path, capsys, pairs):
    write_pbin(tmp_path / "in.pbin", [[1, 2]], 2, index=pickle.dumps(pairs))
    assert convert(tmp_path / "in.pbin", "--to", "nanogpt", "--out", tmp_path / "out.bin") == 2
    assert "document 0 lies outside the data" in capsys.readouterr().err


def test_documents_of_a_pbin_in_any_order(tmp_path):
    write_pbin(tmp_path / "in.pbin", [[1, EOD], [2, 3, EOD]], 2, index=pickle.dumps([(4, 6), (0, 4)]))
    make = [tmp_path / "in.pbin", "--to", "weft", "--vocab-size", 9, "--eod", EOD, "--out", tmp_path / "s"]
    assert convert(*make) == 0
    assert texts_of(tmp_path / "s") == [[2, 3, EOD], [1, EOD]]


# --- LitData and MDS ---


def shard(samples: list[bytes], between: bytes = b"") -> bytes:
    offsets = np.cumsum([0, *map(len, samples)]) + 4 + 4 * (len(samples) + 1) + len(between)
    return struct.pack("<I", len(samples)) + offsets.astype("<u4").tobytes() + between + b"".join(samples)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize(("kind", "dtype"), [("no_header_tensor:16", "<i4"), ("no_header_numpy:5", "<u2")])
def test_litdatas_token_chunks(tmp_path, kind, dtype, compression):
    chunks = []
    for number, texts in enumerate((TEXTS[:2], TEXTS[2:])):
        data = shard([np.array(text, dtype).tobytes() for text in texts])
        name = f"chunk-0-{number}{'.zstd' if compression else ''}.bin"
        (tmp_path / name).write_bytes(zstandard.compress(data) if compression else data)
        size = sum(map(len, texts))
        chunks.append({"chunk_bytes": len(data), "chunk_size": len(texts), "dim": size, "filename": name})
    config = {"compression": compression, "data_format": [kind], "encryption": None, "item_loader": "TokensLoader"}
    (tmp_path / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
    out = tmp_path / "s"
    assert convert(tmp_path, "--to", "weft", "--vocab-size", 120, "--eod", EOD, "--out", out) == 0
    assert texts_of(out) == TEXTS


def ndarray(text, dtype, known_dtype, known_shape):
    values = np.array(text, dtype)
    head = b"" if known_dtype else bytes([{"<i4": 33, "<u2": 16}[dtype]])
    head += b"" if known_shape else bytes([1 << 2 | 1]) + struct.pack("<H", len(values))
    return head + values.tobytes()


@pytest.mark.parametrize("compression", [None, "zstd:7"])
@pytest.mark.parametrize("encoding", ["ndarray:int32", "ndarray", "bytes"])
def test_mds_shards(tmp_path, encoding, compression):
    texts = [text for text in TEXTS if text]
    samples = []
    for text in texts:
        ids = np.array(text, "<i8").tobytes() if encoding == "bytes" else ndarray(text, "<i4", ":" in encoding, False)
        other = b"some text"
        samples.append(struct.pack("<II", len(other), len(ids)) + other + struct.pack("<q", 7) + ids)
    data = shard(samples, b'{"a": "header that the offsets skip"}')
    raw, packed = {"basename": "shard.00000.mds"}, {"basename": "shard.00000.mds.zstd"}
    (tmp_path / (packed if compression else raw)["basename"]).write_bytes(
        zstandard.compress(data) if compression else data
    )
    described = {"format": "mds", "samples": len(texts), "compression": compression}
    described |= {
        "column_names": ["a", "n", "tokens"],
        "column_encodings": ["str", "int", encoding],
        "column_sizes": [None, 8, None],
    }
    described |= {"raw_data": raw, "zip_data": packed if compression else None}
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [described]}))
    make = [tmp_path, "--to", "weft", "--vocab-size", 120, "--eod", EOD, "--out", tmp_path / "s"]
    assert convert(*make, *(["--dtype", "int64"] if encoding == "bytes" else [])) == 0
    assert texts_of(tmp_path / "s") == texts


def test_mds_that_holds_pickles_or_no_ids_is_refused(tmp_path, capsys):
    described = {"format": "mds", "samples": 1, "compression": None, "column_names": ["tokens"], "zip_data": None}
    described |= {"column_encodings": ["pkl"], "column_sizes": [None], "raw_data": {"basename": "x.mds"}}
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [described]}))
    assert convert(tmp_path, "--to", "nanogpt", "--out", tmp_path / "out.bin") == 2
    assert "the encoding 'pkl'; set --field to a column of arrays or bytes" in capsys.readouterr().err


# --- the verb ---


def test_recut_forgets_the_documents_and_masks_are_not_lost_without_a_word(tmp_path, capsys):
    tokens = np.array([1, 2, EOD, 3, EOD, 4, EOD])
    make_store(tmp_path / "s", [2, 3, 2], tokens=tokens, mask=tokens > 1, kind="conversations")
    assert convert(tmp_path / "s", "--to", "pbin", "--recut", "--out", tmp_path / "a.pbin") == 0
    assert "loss mask" in capsys.readouterr().err
    data = (tmp_path / "a.pbin").read_bytes()
    assert [count for _, count in pickle.loads(data[12 + 7 :])] == [3, 2, 2]
    assert convert(tmp_path / "s", "--to", "weft", "--out", tmp_path / "t") == 2
    assert "would lose its loss mask" in capsys.readouterr().err


def test_existing_stores_are_replaced_only_on_request_and_unknown_things_are_named(tmp_path, ours, capsys):
    (tmp_path / "x.pbin").write_bytes(b"mine")
    assert convert(ours, "--to", "pbin", "--out", tmp_path / "x.pbin") == 2
    assert (tmp_path / "x.pbin").read_bytes() == b"mine"
    assert "--overwrite" not in capsys.readouterr().err
    assert convert(tmp_path / "x.pbin", "--to", "megatron", "--out", tmp_path / "m") == 2
    assert "or truncated" in capsys.readouterr().err
    assert convert(ours, "--to", "pbin", "--out", tmp_path / "x.pbin", "--overwrite") == 2
    assert (tmp_path / "x.pbin").read_bytes() == b"mine"
    assert convert(ours, "--to", "pbin", "--out", tmp_path / "z.pbin") == 0
    assert convert(ours, "--to", "pbin", "--out", tmp_path / "z.pbin") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert convert(ours, "--to", "pbin", "--out", tmp_path / "z.pbin", "--overwrite") == 0
    capsys.readouterr()
    (tmp_path / "folder").mkdir()
    for unknown in ("folder", "absent"):
        assert convert(tmp_path / unknown, "--to", "pbin", "--out", tmp_path / "y.pbin") == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert convert(ours, "--to", "megatron", "--out", tmp_path / "m") == 0
    assert (tmp_path / "m.bin").samefile(ours / "tokens.bin")

"""Reads LitData and MosaicML (MDS) folders: an `index.json`, and shards of samples.

In both formats a shard begins with the number of samples (uint32) and the samples' offsets (uint32 `[samples + 1]`).
Shards can be compressed with zstd. Pickled columns are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from weft.data.stores.external.external_store import Documents, ExternalStore
from weft.data.stores.external.nanogpt import id_dtype
from weft.errors import UserError
from weft.files import read_json

# LitData has separate dtype codes for tensors and for arrays.
TENSORS = {11: "uint8", 12: "int8", 13: "int16", 14: "int16", 15: "int32", 16: "int32", 17: "int64", 18: "int64"}
TENSORS |= {20: "uint16"}
ARRAYS = dict(enumerate(["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]))
# dtype codes at the beginning of MDS arrays without a fixed dtype.
VALUES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}

Decode = Callable[[np.ndarray], np.ndarray]  # a sample's bytes -> its ids


def open_litdata(path: Path) -> ExternalStore:
    """Opens a folder that `litdata.optimize` wrote with `TokensLoader`. Each item is a document.

    Raises:
        UserError: the folder does not contain chunks of tokens, or is damaged.
    """
    index = path / "index.json"
    content = read_json(index)
    try:
        config, chunks = content["config"], content["chunks"]
        formats, compression = config["data_format"], config.get("compression")
        if config.get("encryption") or config.get("compression_level") not in (None, "chunk"):
            raise UserError(
                "encryption and compression per sample are not supported; write the chunks without them", index
            )
        kind, _, number = formats[0].partition(":")
        tables = {"no_header_tensor": TENSORS, "no_header_numpy": ARRAYS}
        if len(formats) != 1 or kind not in tables or int(number) not in tables[kind]:
            raise UserError(
                f"expected one array of token ids per item, found {', '.join(formats)}; write it with TokensLoader",
                index,
            )
        dtype = np.dtype(tables[kind][int(number)])
        counts = [int(chunk["chunk_size"]) for chunk in chunks]
        tokens = sum(int(chunk["dim"]) for chunk in chunks)
        files = [(path / chunk["filename"], compression, count) for chunk, count in zip(chunks, counts, strict=True)]
    except (KeyError, TypeError, IndexError, ValueError, AttributeError):
        raise UserError("not an index of LitData token chunks; check the folder and --from", index) from None

    def blocks() -> Iterator[Documents]:
        for file, packed, count in files:
            yield _documents(file, _read(file, packed), count, lambda data: data.view(dtype))

    return ExternalStore("litdata", index, tokens, sum(counts), int(np.iinfo(dtype).max), blocks)


def open_mds(path: Path, field: str | None = None, dtype: str | None = None) -> ExternalStore:
    """Opens a folder that `streaming.MDSWriter` wrote. Each sample is a document.

    Args:
        field: name of the column that contains the ids; default: `tokens`, `input_ids`, or the only column.
        dtype: dtype of the ids, if the column contains bytes.

    Raises:
        UserError: the column is missing or does not contain ids, or a shard is damaged.
    """
    index = path / "index.json"
    content = read_json(index)
    try:
        shards = content["shards"]
        files, documents = [], 0
        decode: Decode | None = None
        for shard in shards:
            names, encodings, sizes = shard["column_names"], shard["column_encodings"], shard["column_sizes"]
            column = _column(names, field, index)
            decode = _column_decoder(sizes, names.index(column), encodings[names.index(column)], dtype, index)
            raw, packed = shard["raw_data"]["basename"], shard.get("zip_data")
            if (path / raw).exists() or not packed:
                files.append((path / raw, None, int(shard["samples"]), decode))
            else:
                files.append((path / packed["basename"], shard["compression"], int(shard["samples"]), decode))
            documents += int(shard["samples"])
    except (KeyError, TypeError, IndexError, ValueError, AttributeError):
        raise UserError("not an index of MDS shards; check the folder and --from", index) from None

    def blocks() -> Iterator[Documents]:
        for file, packed, count, decode in files:
            yield _documents(file, _read(file, packed), count, decode)

    return ExternalStore("mds", index, -1, documents, np.iinfo(np.int64).max, blocks)


def _column(names: list[str], field: str | None, index: Path) -> str:
    for name in [field] if field is not None else ["tokens", "input_ids", *(names if len(names) == 1 else [])]:
        if name in names:
            return str(name)
    raise UserError(f"the column of the ids is unknown; set --field to one of {', '.join(names)}", index)


def _column_decoder(sizes: list, number: int, encoding: str, dtype: str | None, index: Path) -> Decode:
    """Returns a function that extracts a column's ids from a sample.

    A sample begins with the sizes (uint32) of the columns of variable size. The columns follow.

    Args:
        sizes: size of each column in bytes; None for columns of variable size.
        number: index of the column that contains the ids.
        encoding: MDS encoding of this column, such as `ndarray:int32`.
        dtype: dtype of the ids, which is required if the column contains bytes.
        index: path of index.json, for messages.
    """
    kind, *details = encoding.split(":")
    if kind not in ("bytes", "ndarray"):
        raise UserError(
            f"the column of the ids has the encoding {encoding!r}; set --field to a column of arrays or bytes", index
        )
    if kind == "bytes" and dtype is None:
        raise UserError(
            "the column of the ids contains bytes; set the ids' dtype with --dtype (llm-foundry writes int64)", index
        )
    fixed = dtype if kind == "bytes" else details[0] if details else None
    named = id_dtype(fixed) if fixed else None
    variable = [not size for size in sizes]

    def decode(data: np.ndarray) -> np.ndarray:
        written = data[: 4 * sum(variable)].view("<u4").tolist()
        widths = [size or written.pop(0) for size in sizes]
        start = 4 * sum(variable) + sum(widths[:number])
        value, found = data[start : start + widths[number]], named
        if kind == "ndarray":
            if found is None:
                found, value = np.dtype(VALUES[int(value[0])]), value[1:]
            if len(details) < 2:  # skip the shape: 6 bits number of dimensions, 2 bits width of each size
                value = value[1 + (int(value[0]) >> 2) * (1 << (int(value[0]) & 3)) :]
        assert found is not None
        return np.ascontiguousarray(value).view(found)

    return decode


def _read(path: Path, compression: str | None) -> np.ndarray:
    """Reads a shard (usually 64 MB) and decompresses it."""
    try:
        if not compression:
            return np.fromfile(path, np.uint8)
        if compression.split(":")[0] != "zstd":
            raise UserError(
                f"the compression {compression} is not supported; write the shards with zstd or uncompressed", path
            )
        import zstandard

        with open(path, "rb") as file:
            return np.frombuffer(zstandard.ZstdDecompressor().stream_reader(file).read(), np.uint8)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}; check the file and its permissions", path) from None
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise UserError(f"cannot be decompressed: {error}; copy the file again", path) from None


def _documents(path: Path, data: np.ndarray, count: int, decode: Decode) -> Documents:
    """Decodes the samples of a shard to documents. Raises UserError if the shard is damaged.

    Args:
        path: path of the shard, for messages.
        data: bytes of the shard.
        count: number of samples of the shard, as in the index.
        decode: function that extracts the ids from a sample.
    """
    try:
        if int(data[:4].view("<u4")[0]) != count:
            raise ValueError("its number of samples differs from the index")
        offsets = data[4 : 4 + 4 * (count + 1)].view("<u4").astype(np.int64)
        if (np.diff(offsets) < 0).any() or int(offsets[-1]) > len(data):
            raise ValueError("a sample lies outside the shard")
        samples = [decode(data[start:stop]) for start, stop in pairwise(offsets.tolist())]
    except (ValueError, IndexError, KeyError) as error:
        raise UserError(f"damaged: {error}; copy the file again", path) from None
    lengths = np.array([len(sample) for sample in samples], np.int64)
    return (np.concatenate(samples) if samples else np.zeros(0, np.int64)), lengths

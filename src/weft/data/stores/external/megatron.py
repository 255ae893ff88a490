"""Reads Megatron's indexed datasets, with any integer dtype and with documents of several sequences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from weft.data.stores.external.external_store import Documents, ExternalStore
from weft.data.stores.indexed import BLOCK_DOCUMENTS, document_blocks, map_file, release_pages
from weft.errors import UserError
from weft.headers import DTYPE_NAMES, FLOAT_CODES, HEADER, read_megatron_index


def open_megatron(path: Path, format: str = "megatron") -> ExternalStore:
    """Opens an indexed dataset. The sequences of a document are joined.

    Args:
        path: the `.bin` or `.idx` file, their common prefix, or a folder with one pair of these files.
        format: value of `ExternalStore.format` in the result: `megatron`, or `weft` for the dataset of a Weft store.

    Raises:
        UserError: a file is missing, the values are floats, or the index does not match the tokens.
    """
    prefix = find_prefix(path)
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    header = read_megatron_index(index)
    if header.code in FLOAT_CODES:
        raise UserError(f"the dtype is {DTYPE_NAMES[header.code]}, but token ids are integers; check the path", index)
    dtype, count = np.dtype(DTYPE_NAMES[header.code]), header.sequences
    lengths = map_file(index, np.int32, HEADER.size, count)
    offsets = map_file(index, np.int64, HEADER.size + 4 * count, count)
    boundaries = map_file(index, np.int64, HEADER.size + 12 * count, header.boundaries)
    total = _count_tokens(index, lengths, offsets, boundaries, dtype.itemsize)
    size = data.stat().st_size if data.exists() else 0
    if size != total * dtype.itemsize:
        raise UserError(
            f"damaged: it has {size:,} bytes, but its index implies {total * dtype.itemsize:,}; copy both files again",
            data,
        )
    tokens = map_file(data, dtype, 0, total)
    sizes = _DocumentSizes(offsets, boundaries, total, dtype.itemsize)

    def blocks() -> Iterator[Documents]:
        for first, stop, start, end in document_blocks(sizes):  # type: ignore[arg-type]
            yield tokens[start:end], sizes[first:stop]
            release_pages(tokens, offsets, boundaries)

    return ExternalStore(format, data, total, len(sizes), int(np.iinfo(dtype).max), blocks)


def find_prefix(path: Path) -> Path:
    """Returns the path of a dataset's `.bin` and `.idx` files, without these suffixes.

    Args:
        path: one of the files, their common path without suffix, or a folder with one pair of these files.

    Raises:
        UserError: a folder does not contain exactly one `.idx` file.
    """
    if path.is_dir():
        found = sorted(file for file in path.glob("*.idx") if file.is_file())
        if len(found) != 1:
            raise UserError(
                f"expected one .idx file in this folder, found {len(found)}; give the path of the file", path
            )
        path = found[0]
    return path.with_suffix("") if path.suffix in (".bin", ".idx") and not Path(f"{path}.idx").exists() else path


class _DocumentSizes:
    """The number of tokens of each document, computed on access: `sizes[a:b]` is an int64 array."""

    def __init__(self, offsets: np.ndarray, boundaries: np.ndarray, total: int, itemsize: int):
        self.offsets, self.boundaries, self.end, self.itemsize = offsets, boundaries, total * itemsize, itemsize

    def __len__(self) -> int:
        return max(0, len(self.boundaries) - 1)

    def __getitem__(self, documents: slice) -> np.ndarray:
        start, stop, _ = documents.indices(len(self))
        edges = np.array(self.boundaries[start : stop + 1])
        inside = edges < len(self.offsets)
        bytes_ = np.full(len(edges), self.end, np.int64)
        bytes_[inside] = self.offsets[edges[inside]]
        return np.diff(bytes_) // self.itemsize


def _count_tokens(index: Path, lengths, offsets, boundaries, itemsize: int) -> int:
    """Returns the number of tokens. Raises UserError if the sequences or the document boundaries are not contiguous.

    Args:
        index: path of the index, for messages.
        lengths, offsets: number of tokens and byte offset of each sequence.
        boundaries: the document boundaries, as indices of sequences.
        itemsize: number of bytes per token.
    """
    count, end, edge = len(lengths), 0, 0
    for start in range(0, count, BLOCK_DOCUMENTS):
        block = np.array(lengths[start : start + BLOCK_DOCUMENTS], np.int64)
        ends = end + np.cumsum(block) * itemsize
        wrong = np.flatnonzero((offsets[start : start + BLOCK_DOCUMENTS] != ends - block * itemsize) | (block < 0))
        if len(wrong):
            raise UserError(
                f"damaged: sequence {start + int(wrong[0]):,} does not begin where the previous sequence ends; "
                "copy the file again",
                index,
            )
        end = int(ends[-1])
    for start in range(0, len(boundaries), BLOCK_DOCUMENTS):
        block = np.concatenate([[edge], boundaries[start : start + BLOCK_DOCUMENTS]])
        if (np.diff(block) < 0).any():
            raise UserError(
                f"damaged: the document boundaries decrease after boundary {start:,}; copy the file again", index
            )
        edge = int(block[-1])
    if (len(boundaries) and int(boundaries[0]) != 0) or edge != count:
        raise UserError(
            f"damaged: the documents have {edge:,} sequences, but the header counts {count:,}; copy the file again",
            index,
        )
    release_pages(lengths, offsets, boundaries)
    return end // itemsize

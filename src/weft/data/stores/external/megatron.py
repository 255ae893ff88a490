"""Megatron's indexed datasets as others write them: any integer dtype, documents of several sequences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from weft.data.stores.external.external_store import Documents, Foreign
from weft.data.stores.indexed import BLOCK_DOCUMENTS, DTYPES, map_file, release, spans
from weft.errors import UserError
from weft.headers import FLOAT_CODES, HEADER, read_megatron_index


def open_megatron(path: Path, format: str = "megatron") -> Foreign:
    """Open `path` (the prefix, either file, or a folder that holds one pair). A document is all of its sequences.

    Raises:
        UserError: no such files, floats in place of ids, or an index that does not fit the tokens.
    """
    prefix = find_prefix(path)
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    header = read_megatron_index(index)
    if header.code in FLOAT_CODES:
        raise UserError(f"holds {np.dtype(DTYPES[header.code])} numbers, not token ids", index)
    dtype, count = np.dtype(DTYPES[header.code]), header.sequences
    lengths = map_file(index, np.int32, HEADER.size, count)
    offsets = map_file(index, np.int64, HEADER.size + 4 * count, count)
    boundaries = map_file(index, np.int64, HEADER.size + 12 * count, header.boundaries)
    total = _check(index, lengths, offsets, boundaries, dtype.itemsize)
    size = data.stat().st_size if data.exists() else 0
    if size != total * dtype.itemsize:
        raise UserError(f"{size:,} bytes where its index means {total * dtype.itemsize:,}; it is damaged", data)
    tokens = map_file(data, dtype, 0, total)
    sizes = _Sizes(offsets, boundaries, total, dtype.itemsize)

    def blocks() -> Iterator[Documents]:
        for first, stop, start, end in spans(sizes):  # type: ignore[arg-type]
            yield tokens[start:end], sizes[first:stop]
            release(tokens, offsets, boundaries)

    return Foreign(format, data, total, len(sizes), int(np.iinfo(dtype).max), blocks)


def find_prefix(path: Path) -> Path:
    """What the names of `.bin` and `.idx` have in common."""
    if path.is_dir():
        found = sorted(file for file in path.glob("*.idx") if file.is_file())
        if len(found) != 1:
            raise UserError(f"{len(found)} .idx files in this folder; name one of them", path)
        path = found[0]
    return path.with_suffix("") if path.suffix in (".bin", ".idx") and not Path(f"{path}.idx").exists() else path


class _Sizes:
    """Tokens of each document, worked out as they are asked for: `sizes[a:b]` is an int64 array."""

    def __init__(self, offsets: np.ndarray, boundaries: np.ndarray, total: int, itemsize: int):
        self.offsets, self.boundaries, self.end, self.itemsize = offsets, boundaries, total * itemsize, itemsize

    def __len__(self) -> int:
        return max(0, len(self.boundaries) - 1)

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        edges = np.array(self.boundaries[start : stop + 1])
        inside = edges < len(self.offsets)
        bytes_ = np.full(len(edges), self.end, np.int64)
        bytes_[inside] = self.offsets[edges[inside]]
        return np.diff(bytes_) // self.itemsize


def _check(index: Path, lengths, offsets, boundaries, itemsize: int) -> int:
    """The number of tokens, if sequences lie end to end and documents are made of whole ones."""
    count, end, edge = len(lengths), 0, 0
    for start in range(0, count, BLOCK_DOCUMENTS):
        part = np.array(lengths[start : start + BLOCK_DOCUMENTS], np.int64)
        ends = end + np.cumsum(part) * itemsize
        wrong = np.flatnonzero((offsets[start : start + BLOCK_DOCUMENTS] != ends - part * itemsize) | (part < 0))
        if len(wrong):
            raise UserError(f"sequence {start + int(wrong[0]):,} does not begin where the one before ends", index)
        end = int(ends[-1])
    for start in range(0, len(boundaries), BLOCK_DOCUMENTS):
        part = np.concatenate([[edge], boundaries[start : start + BLOCK_DOCUMENTS]])
        if (np.diff(part) < 0).any():
            raise UserError(f"the document boundaries after number {start:,} go back; it is damaged", index)
        edge = int(part[-1])
    if (len(boundaries) and int(boundaries[0]) != 0) or edge != count:
        raise UserError(f"its documents are made of {edge:,} sequences where there are {count:,}; it is damaged", index)
    release(lengths, offsets, boundaries)
    return end // itemsize

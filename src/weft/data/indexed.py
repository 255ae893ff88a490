"""Megatron's indexed dataset (`.bin` + `.idx`, magic MMIDIDX): what Megatron, NeMo and others read and write.

`.idx`, little-endian: 9 bytes magic, uint64 version 1, uint8 dtype code, uint64 number of sequences, uint64 number of
document boundaries, then int32 lengths, int64 byte offsets, int64 document boundaries. `.bin`: the tokens, end to end.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from weft.config.errors import UserError
from weft.config.headers import HEADER, MAGIC, read_index_header

DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 for vocabularies below 65,500, as Megatron chooses; else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedWriter:
    """Writes documents one batch after the other; `finish` writes the index.

    Args:
        mask: write `loss_mask.bin` beside them as well, one byte a token: 1 where it is to be learned.

    Attributes:
        digest: sha256 of the `.bin` so far.
        mask_digest: sha256 of `loss_mask.bin` so far.
    """

    def __init__(self, prefix: Path, dtype: np.dtype, *, mask: bool = False):
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        self.mask_file = open(prefix.with_name("loss_mask.bin"), "wb") if mask else None  # noqa: SIM115
        self.mask_digest = hashlib.sha256()
        self.file = open(prefix.with_suffix(".bin"), "wb")  # noqa: SIM115 (closed by finish)
        self.lengths: list[np.ndarray] = []
        self.digest = hashlib.sha256()
        self.limit = np.iinfo(self.dtype).max

    def add(self, tokens: np.ndarray, lengths: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Append documents.

        Args:
            tokens: all documents' ids, end to end.
            lengths: of each document; their sum is `len(tokens)`.
            mask: bool or uint8, as long as `tokens`; given if and only if the writer was made with `mask`.

        Raises:
            UserError: an id that the dtype cannot hold.
        """
        if len(tokens) and int(tokens.max()) > self.limit:
            raise UserError(
                f"token id {int(tokens.max())} does not fit into {self.dtype}; the tokenizer is inconsistent"
            )
        data = np.ascontiguousarray(tokens, dtype=self.dtype).tobytes()
        self.file.write(data)
        self.digest.update(data)
        if self.mask_file is not None:
            assert mask is not None
            assert len(mask) == len(tokens)
            data = np.ascontiguousarray(mask, dtype=np.uint8).tobytes()
            self.mask_file.write(data)
            self.mask_digest.update(data)
        self.lengths.append(np.asarray(lengths, dtype=np.int32))

    def finish(self) -> str:
        """Close the `.bin`, write the `.idx`, and return the latter's sha256."""
        self.file.close()
        if self.mask_file is not None:
            self.mask_file.close()
        lengths = np.concatenate(self.lengths) if self.lengths else np.zeros(0, np.int32)
        offsets = np.zeros(len(lengths), np.int64)
        np.cumsum(lengths[:-1].astype(np.int64) * self.dtype.itemsize, out=offsets[1:])
        boundaries = np.arange(len(lengths) + 1, dtype=np.int64)
        header = HEADER.pack(MAGIC, 1, CODES[self.dtype], len(lengths), len(boundaries))
        digest = hashlib.sha256()
        with open(self.prefix.with_suffix(".idx"), "wb") as file:
            for part in (header, lengths.tobytes(), offsets.tobytes(), boundaries.tobytes()):
                file.write(part)
                digest.update(part)
        return digest.hexdigest()


class IndexedReader:
    """Opens a `.bin` and `.idx` without reading them.

    Attributes:
        tokens: memory map of all tokens `[num_tokens]`.
        lengths, offsets: memory maps of tokens per document and of their first byte `[num_documents]`.

    Raises:
        UserError: a damaged index, or a `.bin` of another size than it means.
    """

    def __init__(self, prefix: Path):
        index, data = prefix.with_suffix(".idx"), prefix.with_suffix(".bin")
        code, count = read_index_header(index)
        dtype = np.dtype(DTYPES[code])
        self.lengths = map_file(index, np.int32, HEADER.size, count)
        self.offsets = map_file(index, np.int64, HEADER.size + 4 * count, count)
        total = int(self.lengths.sum(dtype=np.int64))
        size = data.stat().st_size if data.exists() else -1
        if size != total * dtype.itemsize:
            raise UserError(
                f"{max(size, 0):,} bytes where {total * dtype.itemsize:,} belong; it is damaged: pack the store again",
                data,
            )
        self.tokens = map_file(data, dtype, 0, total)

    def document(self, number: int) -> np.ndarray:
        """The ids of one document, its end-of-document token among them."""
        start = int(self.offsets[number]) // self.tokens.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[number])]


def map_file(path: Path, dtype, offset: int, count: int) -> np.ndarray:
    """A read-only memory map of `count` numbers `[count]`."""
    if count == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))

"""Megatron's indexed dataset (`.bin` + `.idx`, magic MMIDIDX): what Megatron, NeMo and others read and write.

`.idx`, little-endian: 9 bytes magic, uint64 version 1, uint8 dtype code, uint64 number of sequences, uint64 number of
document boundaries, then int32 lengths, int64 byte offsets, int64 document boundaries. `.bin`: the tokens, end to end.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import UserError
from weft.headers import HEADER, MAGIC, read_index_header

DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
# What is in memory at once: even, so that a preference pair is never torn.
BLOCK_TOKENS, BLOCK_DOCUMENTS = 1 << 22, 1 << 18


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 for vocabularies below 65,500, as Megatron chooses; else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedWriter:
    """Writes documents one batch after the other; `finish` writes the index.

    Memory does not grow with the documents: their lengths wait in a file (`.lengths`) beside the others.

    Args:
        mask: write `loss_mask.bin` beside them as well, one byte a token: 1 where it is to be learned.

    Attributes:
        digest: sha256 of the `.bin` so far.
        mask_digest: sha256 of `loss_mask.bin` so far.
        documents, tokens, empty: so far; empty ones have at most an end-of-document token.
    """

    def __init__(self, prefix: Path, dtype: Any, *, mask: bool = False):
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        self.limit = np.iinfo(self.dtype).max
        self.file = open(prefix.with_suffix(".bin"), "wb")  # noqa: SIM115 (closed by finish)
        self.mask_file = open(prefix.with_name("loss_mask.bin"), "wb") if mask else None  # noqa: SIM115
        self._lengths = open(prefix.with_suffix(".lengths"), "wb")  # noqa: SIM115
        self.digest, self.mask_digest = hashlib.sha256(), hashlib.sha256()
        self.documents = self.tokens = self.empty = 0

    def add(self, tokens: np.ndarray, lengths: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Append documents.

        Args:
            tokens: all documents' ids, end to end; a memory map of any size will do.
            lengths: of each document; their sum is `len(tokens)`.
            mask: bool or uint8, as long as `tokens`; given if and only if the writer was made with `mask`.

        Raises:
            UserError: an id that the dtype cannot hold, or a document longer than the format's 2^31 - 1 tokens.
        """
        lengths = np.asarray(lengths)
        if len(lengths) and int(lengths.max()) > np.iinfo(np.int32).max:
            raise UserError(
                f"document {self.documents + int(lengths.argmax()):,} has {int(lengths.max()):,} tokens, more than the "
                "2,147,483,647 that the format can hold; cut it"
            )
        for start in range(0, len(tokens), BLOCK_TOKENS):
            part = tokens[start : start + BLOCK_TOKENS]
            if part.dtype != self.dtype:
                wrong = int(part.max()) if int(part.max()) > self.limit else int(part.min())
                if wrong > self.limit or wrong < np.iinfo(self.dtype).min:
                    raise UserError(f"token id {wrong} does not fit into {self.dtype}; the tokenizer is inconsistent")
            _append(self.file, self.digest, part, self.dtype)
        if self.mask_file is not None:
            assert mask is not None
            assert len(mask) == len(tokens)
            for start in range(0, len(mask), BLOCK_TOKENS):
                _append(self.mask_file, self.mask_digest, mask[start : start + BLOCK_TOKENS], np.dtype(np.uint8))
        self._lengths.write(lengths.astype("<i4").tobytes())
        self.documents += len(lengths)
        self.tokens += len(tokens)
        self.empty += int(np.count_nonzero(lengths <= 1))

    def finish(self) -> str:
        """Close the `.bin`, write the `.idx`, and return the latter's sha256."""
        self.file.close()
        if self.mask_file is not None:
            self.mask_file.close()
        self._lengths.close()
        waiting = self.prefix.with_suffix(".lengths")
        digest = write_index(self.prefix.with_suffix(".idx"), self.dtype, waiting)
        waiting.unlink()
        return digest


def write_index(path: Path, dtype: Any, lengths_file: Path) -> str:
    """Write an `.idx` in blocks, whatever the number of documents.

    Args:
        dtype: of the tokens in the `.bin`.
        lengths_file: int32, the tokens of each document.

    Returns:
        Its sha256.
    """
    dtype, digest = np.dtype(dtype), hashlib.sha256()
    documents = lengths_file.stat().st_size // 4
    with open(path, "wb") as file:

        def put(data: bytes) -> None:
            file.write(data)
            digest.update(data)

        put(HEADER.pack(MAGIC, 1, CODES[dtype], documents, documents + 1))
        for lengths in _blocks_of_lengths(lengths_file):
            put(lengths.tobytes())
        offset = 0
        for lengths in _blocks_of_lengths(lengths_file):
            ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
            put((offset + ends - lengths.astype(np.int64) * dtype.itemsize).tobytes())
            offset += int(ends[-1])
        for start in range(0, documents + 1, BLOCK_DOCUMENTS):
            put(np.arange(start, min(start + BLOCK_DOCUMENTS, documents + 1), dtype=np.int64).tobytes())
    return digest.hexdigest()


def _blocks_of_lengths(path: Path) -> Iterator[np.ndarray]:
    with open(path, "rb") as file:
        while data := file.read(4 * BLOCK_DOCUMENTS):
            yield np.frombuffer(data, "<i4")


def _append(file, digest, array: np.ndarray, dtype: np.dtype) -> None:
    data = np.ascontiguousarray(array, dtype=dtype).data
    file.write(data)
    digest.update(data)


class IndexedReader:
    """Opens a `.bin` and `.idx` without reading them, in the same time whatever their size.

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
        # Documents lie end to end, so the last one says where the tokens end; `weft data verify` looks at all.
        total = int(self.offsets[-1]) // dtype.itemsize + int(self.lengths[-1]) if count else 0
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


def map_file(path: Path, dtype: Any, offset: int, count: int) -> np.ndarray:
    """A read-only memory map of `count` numbers `[count]`."""
    if count == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    # As a plain array: slicing a `memmap` makes another one, which takes three times as long.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))


def release(*arrays: np.ndarray | None) -> None:
    """Let go of the pages of memory maps that were read: a pass over a large file then needs no more than a block."""
    for array in arrays:
        while array is not None and not isinstance(array, np.memmap):
            array = array.base if isinstance(array, np.ndarray) else None
        if array is not None and hasattr(mmap, "MADV_DONTNEED"):
            array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


def spans(lengths: np.ndarray, step: int = 1) -> Iterator[tuple[int, int, int, int]]:
    """Consecutive documents in blocks: first document, the one after the last, first token, the one after the last.

    A block has at most `BLOCK_DOCUMENTS` documents, and more than `BLOCK_TOKENS` tokens only if it is one item.

    Args:
        lengths: of all documents.
        step: documents of an item, which is never torn: 2 where they are pairs.
    """
    token = 0
    for start in range(0, len(lengths), BLOCK_DOCUMENTS):
        ends = np.cumsum(lengths[start : start + BLOCK_DOCUMENTS], dtype=np.int64)
        first, begin = 0, 0
        while first < len(ends):
            stop = int(np.searchsorted(ends, begin + BLOCK_TOKENS, side="right"))
            stop = min(max(stop - (stop - first) % step, first + step), len(ends))
            end = int(ends[stop - 1])
            yield start + first, start + stop, token + begin, token + end
            first, begin = stop, end
        token += begin

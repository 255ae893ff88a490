"""Reads and writes Megatron's indexed dataset (`.bin` and `.idx`, magic MMIDIDX), the format of Megatron and NeMo.

`.idx`, little-endian: 9 bytes magic, uint64 version 1, uint8 dtype code, uint64 number of sequences, uint64 number of
document boundaries, then int32 lengths, int64 byte offsets, int64 document boundaries. `.bin`: the concatenated token
ids.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.stores.field_files import FieldWriter
from weft.errors import UserError
from weft.headers import DTYPE_NAMES, HEADER, MAGIC

CODES = {np.dtype(name): code for code, name in DTYPE_NAMES.items()}
# Maximum tokens and documents in memory at a time. Even numbers, so that a block never splits a preference pair.
BLOCK_TOKENS, BLOCK_DOCUMENTS = 1 << 22, 1 << 18


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns uint16 for vocabularies below 65,500 and int32 for larger ones, as Megatron does."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedWriter:
    """Writes an indexed dataset: `add` appends documents to the `.bin`, and `finish` writes the `.idx`.

    Memory does not grow with the number of documents, because their lengths are written to a temporary file
    (`.lengths`).

    Args:
        prefix: path of both files without `.bin` and `.idx`.
        mask: whether to write `loss_mask.bin` too, one byte per token: 1 for tokens that are trained on.
        fields: names of fields of documents, of which a file is written too (`field_files.py`).

    Attributes:
        documents, tokens: number of documents and of tokens written so far.
        empty: number of documents written so far that have no token except an end-of-document token.
    """

    def __init__(self, prefix: Path, dtype: Any, *, mask: bool = False, fields: Iterable[str] = ()):
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        self.range = np.iinfo(self.dtype)
        self.file = open(prefix.with_suffix(".bin"), "wb")  # noqa: SIM115 (closed by finish)
        self.mask_file = open(prefix.with_name("loss_mask.bin"), "wb") if mask else None  # noqa: SIM115
        self._fields = {name: FieldWriter(prefix.parent, name) for name in fields}
        self._lengths = open(prefix.with_suffix(".lengths"), "wb")  # noqa: SIM115
        self._digest, self._mask_digest = hashlib.sha256(), hashlib.sha256()
        self.documents = self.tokens = self.empty = 0

    def add(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        mask: np.ndarray | None = None,
        fields: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Appends documents.

        Args:
            tokens: concatenated ids of the documents; can be a memory map of any size.
            lengths: number of tokens of each document; their sum is `len(tokens)`.
            mask: loss mask, bool or uint8 `[len(tokens)]`; required if and only if the writer was created with `mask`.
            fields: value of each document `[len(lengths)]`, for each of the writer's fields.

        Raises:
            UserError: an id does not fit into the dtype, or a document exceeds the format's 2^31 - 1 tokens.
        """
        lengths = np.asarray(lengths)
        if len(lengths) and int(lengths.max()) > np.iinfo(np.int32).max:
            raise UserError(
                f"document {self.documents + int(lengths.argmax()):,} has {int(lengths.max()):,} tokens, more than the "
                "2,147,483,647 that the format allows; split the document"
            )
        for start in range(0, len(tokens), BLOCK_TOKENS):
            block = tokens[start : start + BLOCK_TOKENS]
            if block.dtype != self.dtype:
                for id in (int(block.max()), int(block.min())):
                    if not self.range.min <= id <= self.range.max:
                        raise UserError(
                            f"token id {id} does not fit into {self.dtype}, the dtype for this size of vocabulary; "
                            "check the tokenizer"
                        )
            _append(self.file, self._digest, block, self.dtype)
        if self.mask_file is not None:
            assert mask is not None
            assert len(mask) == len(tokens)
            for start in range(0, len(mask), BLOCK_TOKENS):
                _append(self.mask_file, self._mask_digest, mask[start : start + BLOCK_TOKENS], np.dtype(np.uint8))
        for name, writer in self._fields.items():
            assert fields is not None
            assert len(fields[name]) == len(lengths)
            writer.add(fields[name])
        self._lengths.write(lengths.astype("<i4").tobytes())
        self.documents += len(lengths)
        self.tokens += len(tokens)
        self.empty += int(np.count_nonzero(lengths <= 1))

    def finish(self) -> dict[str, Any]:
        """Closes the `.bin` and writes the `.idx`. Returns attributes of `StoreInfo`: dtype, counts and digests."""
        self.file.close()
        if self.mask_file is not None:
            self.mask_file.close()
        self._lengths.close()
        lengths_file = self.prefix.with_suffix(".lengths")
        idx_sha256 = write_index(self.prefix.with_suffix(".idx"), self.dtype, lengths_file)
        lengths_file.unlink()
        return {
            "dtype": str(self.dtype),
            "documents": self.documents,
            "tokens": self.tokens,
            "bin_sha256": self._digest.hexdigest(),
            "idx_sha256": idx_sha256,
            "mask_sha256": None if self.mask_file is None else self._mask_digest.hexdigest(),
            "fields": {name: writer.finish() for name, writer in self._fields.items()},
        }


def write_index(path: Path, dtype: Any, lengths_file: Path) -> str:
    """Writes an `.idx` in blocks, with bounded memory, and returns its sha256.

    Args:
        dtype: dtype of the token ids in the `.bin`.
        lengths_file: file of int32 numbers, the number of tokens of each document.
    """
    dtype, digest = np.dtype(dtype), hashlib.sha256()
    documents = lengths_file.stat().st_size // 4
    with open(path, "wb") as file:

        def put(data: bytes) -> None:
            file.write(data)
            digest.update(data)

        put(HEADER.pack(MAGIC, 1, CODES[dtype], documents, documents + 1))
        for lengths in _read_lengths(lengths_file):
            put(lengths.tobytes())
        offset = 0
        for lengths in _read_lengths(lengths_file):
            ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
            put((offset + ends - lengths.astype(np.int64) * dtype.itemsize).tobytes())
            offset += int(ends[-1])
        for start in range(0, documents + 1, BLOCK_DOCUMENTS):
            put(np.arange(start, min(start + BLOCK_DOCUMENTS, documents + 1), dtype=np.int64).tobytes())
    return digest.hexdigest()


def _read_lengths(path: Path) -> Iterator[np.ndarray]:
    with open(path, "rb") as file:
        while data := file.read(4 * BLOCK_DOCUMENTS):
            yield np.frombuffer(data, "<i4")


def _append(file, digest, array: np.ndarray, dtype: np.dtype) -> None:
    data = np.ascontiguousarray(array, dtype=dtype).data
    file.write(data)
    digest.update(data)


def map_file(path: Path, dtype: Any, offset: int, count: int) -> np.ndarray:
    """Memory-maps the `count` numbers that begin at byte `offset` of a file. Returns a read-only array `[count]`."""
    if count == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    # A plain array: slicing a `memmap` creates another `memmap`, which takes three times as long.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))


def release_pages(*arrays: np.ndarray | None) -> None:
    """Frees the memory pages of those `arrays` that are memory maps. Other arrays and None are ignored."""
    for array in arrays:
        while array is not None and not isinstance(array, np.memmap):
            array = array.base if isinstance(array, np.ndarray) else None
        if array is not None and hasattr(mmap, "MADV_DONTNEED"):
            array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


def document_blocks(lengths: np.ndarray, step: int = 1) -> Iterator[tuple[int, int, int, int]]:
    """Splits documents into consecutive blocks. Yields (first document, end document, first token, end token).

    The ends are exclusive. A block has at most `BLOCK_DOCUMENTS` documents, and more than `BLOCK_TOKENS` tokens only if
    the block is a single item.

    Args:
        lengths: number of tokens of each document.
        step: number of documents per item, which is never split: 2 for preference pairs.
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

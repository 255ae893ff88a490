"""Reads Modalities' `.pbin`, and writes its index.

The file contains the length of the data in bytes (8 bytes), the size of a token in bytes (4 bytes; both numbers are
little-endian), the data, and a pickled list with one tuple (offset, length) in bytes per document. Because unpickling
can execute code, the reader accepts only lists, tuples and numbers, and refuses every global name.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from weft.data.stores.external.external_store import Documents, ExternalStore
from weft.data.stores.indexed import BLOCK_DOCUMENTS, document_blocks, map_file, release_pages
from weft.errors import UserError

HEAD = 12


def open_pbin(path: Path) -> ExternalStore:
    """Opens a `.pbin` and reads its index into memory.

    The index takes about 150 bytes of memory per document while it is read, and 16 bytes afterwards.

    Raises:
        UserError: the file is not a `.pbin`, is damaged, or has an index that is not a list of pairs of integers.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD)
            length, width = int.from_bytes(head[:8], "little"), int.from_bytes(head[8:], "little")
            size = path.stat().st_size
            if len(head) < HEAD or width not in (1, 2, 4) or HEAD + length >= size:
                raise UserError(
                    "not a .pbin file, or truncated: its header does not match its size; check it, or copy it again",
                    path,
                )
            file.seek(HEAD + length)
            index = read_pairs(file, path)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}; check the file and its permissions", path) from None
    offsets, lengths = index[:, 0], index[:, 1]
    wrong = (offsets < 0) | (lengths < 0) | (offsets + lengths > length) | ((offsets | lengths) % width != 0)
    if wrong.any():
        raise UserError(f"damaged: document {int(wrong.argmax()):,} lies outside the data; copy the file again", path)
    dtype = np.dtype(f"<u{width}")
    tokens = map_file(path, dtype, HEAD, length // width)
    # Documents are usually contiguous; otherwise they are copied one by one.
    contiguous = np.array_equal(offsets, np.cumsum(lengths) - lengths)
    sizes = lengths // width

    def blocks() -> Iterator[Documents]:
        for first, stop, start, end in document_blocks(sizes):
            if contiguous:
                yield tokens[start:end], sizes[first:stop]
            else:
                begins = (offsets[first:stop] // width).tolist()
                documents = [tokens[a : a + n] for a, n in zip(begins, sizes[first:stop].tolist(), strict=True)]
                yield np.concatenate(documents), sizes[first:stop]
            release_pages(tokens)

    return ExternalStore("pbin", path, int(sizes.sum()), len(sizes), int(np.iinfo(dtype).max), blocks)


class _PlainValues(pickle.Unpickler):
    """An unpickler of lists, tuples and numbers. Raises UnpicklingError instead of importing a class or function."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the name {module}.{name}")


def read_pairs(file: BinaryIO, path: Path) -> np.ndarray:
    """Reads a pickled list of pairs of integers, without executing code. Returns int64 `[pairs, 2]`.

    Raises:
        UserError: the pickle is truncated, or its content is not a list of pairs of integers.
    """
    try:
        pairs = _PlainValues(file).load()
        if not isinstance(pairs, list) or not all(type(pair) is tuple and len(pair) == 2 for pair in pairs):
            raise ValueError("items that are not pairs")
        if not all(type(number) is int for pair in pairs for number in pair):
            raise ValueError("pairs of values that are not integers")
        return np.array(pairs, np.int64).reshape(-1, 2)
    except EOFError:
        raise UserError("damaged: its index is truncated; copy the file again", path) from None
    except Exception as error:  # a damaged pickle may raise any
        found = str(error) or "unreadable data"
        raise UserError(
            f"refused: its index is not a list of (offset, length) pairs: it contains {found}; write the file again",
            path,
        ) from None


def write_pairs(file: BinaryIO, lengths: Iterator[np.ndarray]) -> None:
    """Writes the index of a `.pbin`: a pickled list with the (offset, length) of each document, in bytes.

    Each number is pickled as a LONG1 of 8 bytes, and each pair as a TUPLE2. So all pairs have the same size, and the
    list is written block by block.

    Args:
        lengths: blocks of the documents' lengths in bytes, int64.
    """
    number = [("code", "S1"), ("size", "u1"), ("value", "<i8")]
    record = np.dtype([("offset", number), ("length", number), ("tuple", "S1")])
    file.write(b"\x80\x02]")
    offset = 0
    for block in lengths:
        for start in range(0, len(block), BLOCK_DOCUMENTS):
            sizes = block[start : start + BLOCK_DOCUMENTS]
            ends = offset + np.cumsum(sizes)
            records = np.empty(len(sizes), record)
            for name, values in (("offset", ends - sizes), ("length", sizes)):
                records[name]["code"], records[name]["size"], records[name]["value"] = b"\x8a", 8, values
            records["tuple"] = b"\x86"
            file.write(b"(" + records.tobytes() + b"e")
            offset = int(ends[-1])
    file.write(b".")

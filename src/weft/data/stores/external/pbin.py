"""Modalities' `.pbin`: 8 bytes length of the data, 4 bytes size of a token (both little-endian), the data, and a
pickled list of (offset, length) in bytes, one tuple for each document.

A pickle is a program. This one may make lists, tuples and numbers: to name anything that could be called is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from weft.data.stores.external.external_store import Documents, Foreign
from weft.data.stores.indexed import BLOCK_DOCUMENTS, map_file, release, spans
from weft.errors import UserError

HEAD = 12


def open_pbin(path: Path) -> Foreign:
    """Open a `.pbin`. Its index is read into memory: some 150 bytes a document while it is read, then 16.

    Raises:
        UserError: not such a file, a damaged one, or an index that is more than a list of pairs of numbers.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD)
            length, width = int.from_bytes(head[:8], "little"), int.from_bytes(head[8:], "little")
            size = path.stat().st_size
            if len(head) < HEAD or width not in (1, 2, 4) or HEAD + length >= size:
                raise UserError("not a .pbin file, or one cut short: its header does not fit its size", path)
            file.seek(HEAD + length)
            index = read_pairs(file, path)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", path) from None
    offsets, lengths = index[:, 0], index[:, 1]
    wrong = (offsets < 0) | (lengths < 0) | (offsets + lengths > length) | ((offsets | lengths) % width != 0)
    if wrong.any():
        raise UserError(f"document {int(wrong.argmax()):,} lies outside of the data; it is damaged", path)
    dtype = np.dtype(f"<u{width}")
    tokens = map_file(path, dtype, HEAD, length // width)
    # Usually end to end; otherwise documents are copied one by one.
    dense = np.array_equal(offsets, np.cumsum(lengths) - lengths)
    sizes = lengths // width

    def blocks() -> Iterator[Documents]:
        for first, stop, start, end in spans(sizes):
            if dense:
                yield tokens[start:end], sizes[first:stop]
            else:
                begins = (offsets[first:stop] // width).tolist()
                parts = [tokens[a : a + n] for a, n in zip(begins, sizes[first:stop].tolist(), strict=True)]
                yield np.concatenate(parts), sizes[first:stop]
            release(tokens)

    return Foreign("pbin", path, int(sizes.sum()), len(sizes), int(np.iinfo(dtype).max), blocks)


class _PlainValues(pickle.Unpickler):
    """Makes lists, tuples and numbers; whatever would import or call anything is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the name {module}.{name}")


def read_pairs(file: BinaryIO, path: Path) -> np.ndarray:
    """A pickled list of pairs of whole numbers, int64 `[pairs, 2]`; nothing is executed.

    Raises:
        UserError: it is anything else.
    """
    try:
        pairs = _PlainValues(file).load()
        if not isinstance(pairs, list) or not all(type(pair) is tuple and len(pair) == 2 for pair in pairs):
            raise ValueError("other things than pairs")
        if not all(type(number) is int for pair in pairs for number in pair):
            raise ValueError("pairs of other than whole numbers")
        return np.array(pairs, np.int64).reshape(-1, 2)
    except EOFError:
        raise UserError("its index is broken off; the file is damaged", path) from None
    except Exception as error:  # damage makes the library raise nearly any
        what = f"its index is not a list of (offset, length), but has {str(error) or 'nothing that can be read'}"
        raise UserError(f"{what}; not read any further", path) from None


def write_index(file: BinaryIO, lengths: Iterator[np.ndarray]) -> None:
    """Write documents' lengths in bytes (int64, in blocks) as the pickled list of (offset, length) of Modalities.

    Each number is LONG1 with 8 bytes, each pair TUPLE2: records of one size, so an index of any length is streamed.
    """
    number = [("code", "S1"), ("size", "u1"), ("value", "<i8")]
    record = np.dtype([("offset", number), ("length", number), ("tuple", "S1")])
    file.write(b"\x80\x02]")
    offset = 0
    for block in lengths:
        for start in range(0, len(block), BLOCK_DOCUMENTS):
            part = block[start : start + BLOCK_DOCUMENTS]
            ends = offset + np.cumsum(part)
            records = np.empty(len(part), record)
            for name, values in (("offset", ends - part), ("length", part)):
                records[name]["code"], records[name]["size"], records[name]["value"] = b"\x8a", 8, values
            records["tuple"] = b"\x86"
            file.write(b"(" + records.tobytes() + b"e")
            offset = int(ends[-1])
    file.write(b".")

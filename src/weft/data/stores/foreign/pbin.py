"""Modalities' `.pbin`: 8 bytes length of the data, 4 bytes size of a token (both little-endian), the data, and a
pickled list of (offset, length) in bytes, one tuple for each document.

A pickle is a program. This one is not run: only the few instructions that make a list of pairs of whole numbers are
understood, and any other one is refused.
"""

from __future__ import annotations

import pickletools
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from weft.config.errors import UserError
from weft.data.stores.foreign.foreign import Documents, Foreign
from weft.data.stores.indexed import BLOCK_DOCUMENTS, map_file, release, spans

HEAD = 12
MARK = object()


def open_pbin(path: Path) -> Foreign:
    """Open a `.pbin`. Its index is read into memory: 16 bytes a document.

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


def read_pairs(file: BinaryIO, path: Path) -> np.ndarray:
    """A pickled list of pairs of whole numbers, int64 `[pairs, 2]`; nothing is executed.

    Raises:
        UserError: it is anything else.
    """
    flat = array("q")  # the pairs that are in the list already
    stack: list = []  # whole numbers, pairs, marks, and `flat` where the list is
    try:
        for code, argument, _ in pickletools.genops(file):
            name = code.name
            if name in ("PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
                continue
            if name in ("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG"):
                stack.append(argument)
            elif name == "MARK":
                stack.append(MARK)
            elif name in ("TUPLE2", "TUPLE"):
                pair = (stack.pop(-2), stack.pop())
                if not all(type(number) is int for number in pair) or (name == "TUPLE" and stack.pop() is not MARK):
                    raise ValueError("a tuple of other than two whole numbers")
                stack.append(pair)
            elif name in ("EMPTY_LIST", "LIST") and flat not in stack and not flat:
                pairs = _above_mark(stack) if name == "LIST" else []
                stack.append(flat)
                _extend(flat, pairs)
            elif name == "APPENDS":
                pairs = _above_mark(stack)
                _extend(_last(stack), pairs)
            elif name == "APPEND":
                pair = stack.pop()
                _extend(_last(stack), [pair])
            elif name == "STOP" and len(stack) == 1 and stack[0] is flat:
                return np.frombuffer(flat, np.int64).reshape(-1, 2) if flat else np.zeros((0, 2), np.int64)
            else:
                raise ValueError(f"the instruction {name}")
    except (ValueError, IndexError, OverflowError, TypeError) as error:
        told = str(error) or "broken off"
        what = f"its index is not a list of (offset, length), but has {told}; not read any further"
        raise UserError(what, path) from None
    raise UserError("its index is broken off; the file is damaged", path)


def _above_mark(stack: list) -> list:
    above = []
    while (item := stack.pop()) is not MARK:
        above.append(item)
    return above[::-1]


def _last(stack: list) -> array:
    if type(stack[-1]) is not array:
        raise ValueError("something added to what is no list")
    return stack[-1]


def _extend(flat: array, pairs: list) -> None:
    for pair in pairs:
        if type(pair) is not tuple:
            raise ValueError("an element that is no pair")
        flat.extend(pair)


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

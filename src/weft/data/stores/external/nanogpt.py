"""nanoGPT's `.bin`: token ids end to end, and nothing else. Documents are not marked but by their last token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from weft.data.stores.external.external_store import Documents, Foreign
from weft.data.stores.indexed import BLOCK_TOKENS, map_file, release
from weft.errors import UserError


def open_nanogpt(path: Path, dtype: str = "uint16") -> Foreign:
    """Open a stream of ids of this dtype.

    Raises:
        UserError: no such file, or one that ends within an id.
    """
    if not path.is_file():
        raise UserError("no such file", path)
    kind = id_dtype(dtype)
    size = path.stat().st_size
    if size % kind.itemsize:
        raise UserError(f"{size:,} bytes are no whole number of {kind} ids; --dtype says what they are", path)
    tokens = map_file(path, kind, 0, size // kind.itemsize)

    def blocks() -> Iterator[Documents]:
        for start in range(0, len(tokens), BLOCK_TOKENS):
            yield tokens[start : start + BLOCK_TOKENS], np.zeros(0, np.int64)
            release(tokens)

    return Foreign("nanogpt", path, len(tokens), None, int(np.iinfo(kind).max), blocks)


def id_dtype(name: str) -> np.dtype:
    """A dtype that can hold ids.

    Raises:
        UserError: it cannot.
    """
    if name not in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        raise UserError(f"dtype {name}: ids are int8 to int64 or uint8 to uint64")
    return np.dtype(name).newbyteorder("<")

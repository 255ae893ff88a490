"""Opens nanoGPT's `.bin`: a stream of token ids without a header. Only end-of-document tokens separate documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from weft.data.stores.external.external_store import Documents, ExternalStore
from weft.data.stores.indexed import BLOCK_TOKENS, map_file, release_pages
from weft.errors import UserError


def open_nanogpt(path: Path, dtype: str = "uint16") -> ExternalStore:
    """Opens a file of token ids of the given dtype.

    Raises:
        UserError: the file is missing, the dtype is invalid, or the file size is not a multiple of the dtype's size.
    """
    if not path.is_file():
        raise UserError("no such file; check the path", path)
    kind = id_dtype(dtype)
    size = path.stat().st_size
    if size % kind.itemsize:
        raise UserError(
            f"the file's {size:,} bytes are not a multiple of the size of {kind}; set the ids' dtype with --dtype", path
        )
    tokens = map_file(path, kind, 0, size // kind.itemsize)

    def blocks() -> Iterator[Documents]:
        for start in range(0, len(tokens), BLOCK_TOKENS):
            yield tokens[start : start + BLOCK_TOKENS], np.zeros(0, np.int64)
            release_pages(tokens)

    return ExternalStore("nanogpt", path, len(tokens), None, int(np.iinfo(kind).max), blocks)


def id_dtype(name: str) -> np.dtype:
    """Returns the little-endian integer dtype with this name.

    Raises:
        UserError: no integer dtype has this name.
    """
    if name not in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        raise UserError(f"dtype {name}: not a dtype of token ids; use one of int8 to int64 or uint8 to uint64")
    return np.dtype(name).newbyteorder("<")

"""Loads the library gguf, which reads and writes GGUF files and quantizes tensors."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from weft.errors import UserError


def gguf_library() -> ModuleType:
    """Returns the module gguf. Raises UserError if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UserError("GGUF files need the package gguf; install it: pip install 'weft-train[gguf]'") from None
    return gguf


_LONGEST = 2**22  # items of an array; a vocabulary has at most some 100,000


def open_gguf(path: Path) -> Any:
    """Returns a `gguf.GGUFReader` of a file.

    The library reads lengths in a damaged file as they are, and would read on after the end of the file.

    Raises:
        UserError: the file is not a GGUF file, or damaged.
    """
    gguf = gguf_library()

    class Reader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("it ends too early")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: Any) -> Any:
            if raw_type == gguf.GGUFValueType.ARRAY:
                length = int(self._get(orig_offs + 4, np.uint64)[0])
                if length > min(_LONGEST, len(self.data)):
                    raise ValueError(f"an array has {length:,} items")
            return super()._get_field_parts(orig_offs, raw_type)

    try:
        return Reader(path)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"not a GGUF file, or damaged ({error}); download the file again", path) from None

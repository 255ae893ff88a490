"""Loads the library gguf, which reads and writes GGUF files and quantizes tensors."""

from __future__ import annotations

from types import ModuleType

from weft.errors import UserError


def gguf_library() -> ModuleType:
    """Returns the module gguf. Raises UserError if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UserError("GGUF files need the package gguf; install it: pip install 'weft-train[gguf]'") from None
    return gguf

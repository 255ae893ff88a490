"""Defines `ExternalStore`, the common view of the token stores of other tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Documents = tuple[np.ndarray, np.ndarray]  # concatenated ids, and the length of each document (int64)


@dataclass(frozen=True)
class ExternalStore:
    """A token store in an external format, opened for reading.

    Attributes:
        format: name of the format, such as `megatron`.
        path: file of the store, for error messages.
        tokens: number of tokens; -1 if the number is unknown before the data is read.
        documents: number of documents; None for a stream of tokens without document boundaries.
        largest: the largest id that the dtype can represent.
        blocks: function that yields the documents in order, in blocks. A stream is yielded in slices, with empty arrays
            of lengths.
    """

    format: str
    path: Path
    tokens: int
    documents: int | None
    largest: int
    blocks: Callable[[], Iterator[Documents]]

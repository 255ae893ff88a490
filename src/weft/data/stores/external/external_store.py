"""A token store of another tool, opened for reading."""

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
        path: the file that errors refer to.
        tokens: number of tokens; -1 if it is unknown before reading.
        documents: number of documents; None for a stream of tokens without document boundaries.
        largest: the largest id that the dtype can hold.
        blocks: yields the documents in order. For a stream, yields slices of it with empty lengths.
    """

    format: str
    path: Path
    tokens: int
    documents: int | None
    largest: int
    blocks: Callable[[], Iterator[Documents]]

"""An opened token store of another tool's, as every reader here gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Documents = tuple[np.ndarray, np.ndarray]  # ids end to end, and how many are each document's (int64)


@dataclass(frozen=True)
class Foreign:
    """An opened store of another tool's.

    Attributes:
        path: the file that an error is about.
        tokens: in all; -1 where only reading tells.
        documents: how many, or None where there is but one stream of tokens.
        largest: what its dtype can hold.
        blocks: gives its documents in order; of a stream without documents, pieces of it with no lengths (empty).
    """

    format: str
    path: Path
    tokens: int
    documents: int | None
    largest: int
    blocks: Callable[[], Iterator[Documents]]

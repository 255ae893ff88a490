"""Defines `SavedTensor`, a tensor of a saved model that is read on demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

BLOCK = 4 * 2**20  # bytes in a block of rows, approximately; a row is never split


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a saved model, read on demand.

    Attributes:
        read: `read(start, length)` returns `length` rows, beginning with row `start`, on the CPU. For a tensor without
            dimensions it returns the tensor.
        reads_all: whether every call of `read` computes the full tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]
    reads_all: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Number of rows in a block of about `BLOCK` bytes."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        return max(1, BLOCK // max(1, row))

    def full(self) -> torch.Tensor:
        """Reads the full tensor."""
        return self.read(0, self.shape[0] if self.shape else 1)

    def blocks(self, rows: int | None = None) -> Iterator[torch.Tensor]:
        """Yields consecutive blocks of up to `rows` rows (default: `self.rows`)."""
        rows = rows or self.rows
        if not self.shape:
            yield self.full()
        elif self.reads_all:
            yield from self.full().split(rows)
        else:
            for start in range(0, self.shape[0], rows):
                yield self.read(start, min(rows, self.shape[0] - start))

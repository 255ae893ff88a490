"""Defines a dataset without content, for pipeline ranks that have neither the embedding nor the output head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from weft.data.batches.samples import Dataset


class PlaceholderDataset:
    """A dataset with the size of another dataset, which is not read: all ids are 0, and all weights are 1.

    Args:
        dataset: dataset that is replaced; only its size is used.
        sequence_length: number of tokens of every sample.
    """

    complete = True

    def __init__(self, dataset: Dataset, sequence_length: int):
        self.dataset, self.sequence_length = dataset, sequence_length

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: array[0] for name, array in self.read(np.array([index])).items()}

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns `tokens`, `labels`, `weight` and `positions` `[n, sequence_length]`."""
        shape = (len(indices), self.sequence_length)
        zeros = np.zeros(shape, np.int64)
        positions = np.broadcast_to(np.arange(self.sequence_length), shape).copy()
        return {"tokens": zeros, "labels": zeros.copy(), "weight": np.ones(shape, np.float32), "positions": positions}

"""Samples whose contents nobody here needs: those of a pipeline's ranks that have neither embedding nor head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from weft.data.batches.samples import Dataset


class UnreadDataset:
    """As many samples as another dataset, each whole rows that count in full: nothing of them is read.

    Args:
        dataset: whose length and places these are.
        sequence_length: of every sample.
    """

    complete = True

    def __init__(self, dataset: Dataset, sequence_length: int):
        self.dataset, self.sequence_length = dataset, sequence_length

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: part[0] for name, part in self.read(np.array([index])).items()}

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """`tokens`, `labels`, `weight` and `positions` of the right shape, `[samples, sequence_length]`."""
        shape = (len(indices), self.sequence_length)
        zeros = np.zeros(shape, np.int64)
        positions = np.broadcast_to(np.arange(self.sequence_length), shape).copy()
        return {"tokens": zeros, "labels": zeros.copy(), "weight": np.ones(shape, np.float32), "positions": positions}

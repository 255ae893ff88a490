"""In which order a dataset is read: epoch after epoch, each in an order of its own, as a function of the number."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from weft.data.permutation import Permutation


class Order(Protocol):
    """Says where the samples of a run lie in its dataset. A pure function: any sample is reached without the others."""

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """Numbers of samples over all epochs, int64 `[n]`, to indices of the dataset, int64 `[n]`."""
        ...


class Epochs:
    """Sample `k` of a stream over `size` items is the `k % size`-th of epoch `k // size`.

    Args:
        key: each epoch's order is a permutation keyed by this and the epoch's number.
        shuffle: False: every epoch in the items' own order.
    """

    def __init__(self, size: int, *key: int | str, shuffle: bool = True):
        self.size, self.key, self.shuffle = size, key, shuffle

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        epochs, order = np.divmod(samples, self.size)
        if not self.shuffle:
            return order
        result = np.empty_like(order)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = Permutation(self.size, *self.key, int(epoch))(order[chosen])
        return result

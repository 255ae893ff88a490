"""In which order a dataset is read: epoch after epoch, each in an order of its own, as a function of the number."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from weft.data.permutation import Permutation

CHUNK = 2048  # places of an order that are worked out together


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
        self._chunks: dict[tuple[int, int], np.ndarray] = {}

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        epochs, order = np.divmod(samples, self.size)
        if not self.shuffle:
            return order
        result = np.empty_like(order)
        chunks = order // CHUNK
        if len(samples) and epochs[0] == epochs[-1] and chunks[0] == chunks[-1] and (np.diff(samples) >= 0).all():
            return self._chunk(int(epochs[0]), int(chunks[0]))[order - chunks * CHUNK]  # the usual case
        for epoch, chunk in np.unique(np.stack([epochs, chunks]), axis=1).T.tolist():
            chosen = (epochs == epoch) & (chunks == chunk)
            result[chosen] = self._chunk(epoch, chunk)[order[chosen] - chunk * CHUNK]
        return result

    def _chunk(self, epoch: int, chunk: int) -> np.ndarray:
        """A piece of an epoch's order: steps ask for the next few again and again; many at once cost little more."""
        if (epoch, chunk) not in self._chunks:
            if len(self._chunks) >= 2:
                self._chunks.pop(next(iter(self._chunks)))
            places = np.arange(chunk * CHUNK, min(self.size, (chunk + 1) * CHUNK))
            self._chunks[epoch, chunk] = Permutation(self.size, *self.key, epoch)(places)
        return self._chunks[epoch, chunk]

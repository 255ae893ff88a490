"""Defines the order in which a run reads a dataset: shuffled epochs, which are computed without state."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from weft.data.permutation import Permutation

CHUNK = 2048  # number of positions of an order that are computed together


class Order(Protocol):
    """A function that maps the samples of a run to indices of its dataset.

    The function is pure, so any sample can be computed without the samples before it.
    """

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """Maps indices of samples in the run (over all epochs) to indices of the dataset; both int64 `[n]`."""
        ...


class Epochs:
    """The order of shuffled epochs: sample `k` of the run is the `k % size`-th sample of epoch `k // size`.

    Args:
        size: number of samples in the dataset.
        key: seed of the permutations; each epoch combines it with the epoch's index.
        shuffle: whether to shuffle each epoch; False keeps the order of the dataset.
    """

    def __init__(self, size: int, *key: int | str, shuffle: bool = True):
        self.size, self.key, self.shuffle = size, key, shuffle
        self._chunks: dict[tuple[int, int], np.ndarray] = {}

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        if len(samples) and self.shuffle and (samples[1:] >= samples[:-1]).all():
            first_epoch, first = divmod(int(samples[0]), self.size)
            last_epoch, last = divmod(int(samples[-1]), self.size)
            if first_epoch == last_epoch and first // CHUNK == last // CHUNK:  # as are most batches
                start = first // CHUNK * CHUNK
                return self._chunk(first_epoch, first // CHUNK)[samples - (first_epoch * self.size + start)]
        epochs, order = np.divmod(samples, self.size)
        if not self.shuffle:
            return order
        result = np.empty_like(order)
        chunks = order // CHUNK
        for epoch, chunk in np.unique(np.stack([epochs, chunks]), axis=1).T.tolist():
            selected = (epochs == epoch) & (chunks == chunk)
            result[selected] = self._chunk(epoch, chunk)[order[selected] - chunk * CHUNK]
        return result

    def _chunk(self, epoch: int, chunk: int) -> np.ndarray:
        """Returns entries `chunk * CHUNK` to `(chunk + 1) * CHUNK - 1` of an epoch's order. Caches two results."""
        if (epoch, chunk) not in self._chunks:
            if len(self._chunks) >= 2:
                self._chunks.pop(next(iter(self._chunks)))
            positions = np.arange(chunk * CHUNK, min(self.size, (chunk + 1) * CHUNK))
            self._chunks[epoch, chunk] = Permutation(self.size, *self.key, epoch)(positions)
        return self._chunks[epoch, chunk]

"""The order in which a run reads a dataset: shuffled epochs, as a stateless function of the sample number."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from weft.data.permutation import Permutation

CHUNK = 2048  # positions of an order that are computed together


class Order(Protocol):
    """Maps the samples of a run to its dataset. A pure function, so any sample is reached without the others."""

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """Maps sample numbers over all epochs, int64 `[n]`, to indices of the dataset, int64 `[n]`."""
        ...


class Epochs:
    """Maps sample `k` of a stream over `size` items to the `k % size`-th item of epoch `k // size`.

    Args:
        key: keys the permutation of each epoch, with the epoch's number.
        shuffle: False keeps the order of the items.
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
            selected = (epochs == epoch) & (chunks == chunk)
            result[selected] = self._chunk(epoch, chunk)[order[selected] - chunk * CHUNK]
        return result

    def _chunk(self, epoch: int, chunk: int) -> np.ndarray:
        """Returns a chunk of an epoch's order. Cached, because consecutive steps read the same chunk."""
        if (epoch, chunk) not in self._chunks:
            if len(self._chunks) >= 2:
                self._chunks.pop(next(iter(self._chunks)))
            positions = np.arange(chunk * CHUNK, min(self.size, (chunk + 1) * CHUNK))
            self._chunks[epoch, chunk] = Permutation(self.size, *self.key, epoch)(positions)
        return self._chunks[epoch, chunk]

"""A keyed pseudo-random permutation of `0 .. n-1` in constant memory: a Feistel network with cycle walking.

Luby & Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", 1988. Each index is permuted
independently, so shuffling a trillion samples takes no set-up time and no memory.
"""

from __future__ import annotations

import hashlib

import numpy as np

ROUNDS = 6


class Permutation:
    """A pseudo-random permutation of `range(n)`, determined by `key`: `Permutation(n, *key)(indices)`."""

    def __init__(self, n: int, *key: int | str):
        self.n = n
        bits = max(2, (n - 1).bit_length())
        self.half = np.uint64((bits + 1) // 2)
        self.mask = np.uint64((1 << int(self.half)) - 1)
        digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8 * ROUNDS).digest()
        self.keys = np.frombuffer(digest, dtype="<u8")

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Permutes integers in `0 .. n-1`, of any shape; returns int64 of the same shape."""
        values = self._rounds(np.asarray(indices).astype(np.uint64))
        # The network permutes the next power of four: values outside range(n) go through the network again.
        outside = values >= self.n
        while outside.any():
            values[outside] = self._rounds(values[outside])
            outside = values >= self.n
        return values.astype(np.int64)

    def _rounds(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self.half, values & self.mask
        for key in self.keys:
            left, right = right, left ^ (mix(right ^ key) & self.mask)
        return (left << self.half) | right


def mix(x: np.ndarray) -> np.ndarray:
    """Returns a uint64 hash of each uint64 number in `x`. Each input bit affects each output bit.

    The hash is the finalizer of SplitMix64 (Steele, Lea & Flood, 2014).
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

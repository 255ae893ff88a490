"""Finds items with equal keys in bounded memory, for any number of items."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

BUCKET_ITEMS = 1 << 22  # maximum items sorted at a time: about 300 MB


class Groups:
    """Finds the items whose keys occur more than once.

    The highest bits of a key determine the temporary file to which the key is written. So equal keys are in the same
    file, and every file is small enough to be sorted in memory.

    Args:
        folder: folder of the temporary files.
        items: approximate number of keys.
        columns: number of uint64 numbers per key; the first number must be uniformly distributed.
    """

    def __init__(self, folder: Path, items: int, columns: int = 1):
        self.bits = min((items // BUCKET_ITEMS).bit_length(), 9)
        self.columns = columns
        self.record = np.dtype([("key", "<u8", (columns,)), ("number", "<i8")])
        self.paths = [folder / f"bucket-{number}" for number in range(1 << self.bits)]
        self.files = [open(path, "wb") for path in self.paths]  # noqa: SIM115 (closed by equal)

    def add(self, keys: np.ndarray, first: int) -> None:
        """Adds the keys `[items, columns]` of the items with the indices `first`, `first + 1`, ..."""
        records = np.empty(len(keys), self.record)
        records["key"], records["number"] = keys, np.arange(first, first + len(keys))
        if self.bits == 0:
            self.files[0].write(records.data)
            return
        bucket = (keys[:, 0] >> np.uint64(64 - self.bits)).astype(np.int64)
        records = records[np.argsort(bucket, kind="stable")]
        ends = np.cumsum(np.bincount(bucket, minlength=len(self.files)))
        for file, start, end in zip(self.files, [0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            file.write(records[start:end].data)

    def equal(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the items whose key occurs more than once: the items' indices and group numbers, both int64 `[items]`.

        The items of a group have equal keys; they are adjacent, with ascending indices. A group is never split between
        two yielded arrays.
        """
        for file, path in zip(self.files, self.paths, strict=True):
            file.close()
            records = np.fromfile(path, self.record)
            path.unlink()
            keys, numbers = records["key"], records["number"]
            order = np.lexsort((numbers, *(keys[:, column] for column in range(self.columns))))
            keys, numbers = keys[order], numbers[order]
            same = (keys[1:] == keys[:-1]).all(1)
            follows = np.concatenate([[False], same])
            shared = follows | np.concatenate([same, [False]])
            if shared.any():
                yield numbers[shared], np.cumsum(~follows)[shared]

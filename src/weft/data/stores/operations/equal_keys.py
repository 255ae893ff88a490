"""Finds items with equal keys in bounded memory, for any number of items."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

BUCKET_ITEMS = 1 << 22  # sorted at once: about 300 MB


class Groups:
    """Collects keys and yields those that occur more than once.

    Distributes keys over files by their highest bits. Equal keys are in the same file, which is small enough to sort.

    Args:
        folder: for the temporary files.
        items: approximate number of keys.
        columns: uint64 numbers per key; the first must be uniformly distributed.
    """

    def __init__(self, folder: Path, items: int, columns: int = 1):
        self.bits = min((items // BUCKET_ITEMS).bit_length(), 9)
        self.columns = columns
        self.record = np.dtype([("key", "<u8", (columns,)), ("number", "<i8")])
        self.paths = [folder / f"bucket-{number}" for number in range(1 << self.bits)]
        self.files = [open(path, "wb") for path in self.paths]  # noqa: SIM115 (closed by equal)

    def add(self, keys: np.ndarray, first: int) -> None:
        """Adds the keys `[items, columns]` of the items `first`, `first + 1`, ..."""
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
        """Yields items whose key occurs more than once: item numbers and group numbers, both int64 `[items]`.

        The items of a group are adjacent and ascending.
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

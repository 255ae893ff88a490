"""A store read in blocks of documents, with bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from weft.data.stores.indexed import release, spans
from weft.data.stores.store import TokenStore
from weft.errors import UserError


@dataclass(frozen=True)
class Block:
    """Consecutive documents.

    Attributes:
        first: number of the first one.
        lengths: of each `[documents]`.
        tokens: end to end `[tokens]`.
        mask: uint8 `[tokens]`, or None.
    """

    first: int
    lengths: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray | None

    def choose(self, keep: np.ndarray) -> Block:
        """The documents for which `keep` `[documents]` is true (their `first` means nothing any more)."""
        if keep.all():
            return self
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        edges = np.flatnonzero(np.diff(keep, prepend=False, append=False))
        runs = [slice(a, b) for a, b in ends[edges].reshape(-1, 2).tolist()]

        def kept(array: np.ndarray) -> np.ndarray:
            return np.concatenate([array[run] for run in runs]) if runs else array[:0]

        return Block(-1, self.lengths[keep], kept(self.tokens), None if self.mask is None else kept(self.mask))

    def documents(self) -> Iterator[np.ndarray]:
        """Each document's ids."""
        end = 0
        for length in self.lengths.tolist():
            yield self.tokens[end : end + length]
            end += length


def open_items(path: str | Path) -> TokenStore:
    """Open a store whose documents are to be moved about.

    Raises:
        UserError: no store, a damaged one, or one of preferences whose last has no partner.
    """
    store = TokenStore.open(path)
    if store.num_documents % store.info.item_documents:
        raise UserError(f"{store.num_documents:,} documents are no pairs; it is damaged: pack it again", path)
    return store


def scan(store: TokenStore, on_tokens: Callable[[int], None] = lambda done: None) -> Iterator[Block]:
    """All documents in order, in blocks that never part a pair.

    Args:
        on_tokens: told how many tokens have been read.
    """
    for first, stop, start, end in spans(store.lengths, store.info.item_documents):
        lengths = np.array(store.lengths[first:stop], np.int64)
        # Plain arrays: slicing a memmap again costs a microsecond.
        mask = None if store.loss_mask is None else np.asarray(store.loss_mask[start:end])
        yield Block(first, lengths, np.asarray(store.tokens[start:end]), mask)
        release(store.tokens, store.loss_mask, store.lengths)
        on_tokens(end)


def read_parts(file: BinaryIO, starts: np.ndarray, sizes: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Bytes from many places of a file, end to end, as an array of `dtype`.

    They are read, not mapped: each place would bring the 64 KB around it into memory.

    Args:
        file: opened without a buffer.
        starts, sizes: of each place, in bytes.
    """
    array = np.empty(int(sizes.sum()) // dtype.itemsize, dtype)
    room, at = array.data.cast("B"), 0
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        file.seek(start)
        end = at + size
        while at < end:
            if not (got := file.readinto(room[at:end])):  # type: ignore[attr-defined]
                raise UserError("ends too early; it was changed while it was read", file.name)
            at += got
    return array

"""Reads a store in blocks of documents, with bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from weft.data.stores.indexed import document_blocks, release_pages
from weft.data.stores.store import TokenStore
from weft.errors import UserError


@dataclass(frozen=True)
class Block:
    """A block of documents.

    Attributes:
        first: index of the first document in the store; -1 if the documents are not consecutive in the store.
        lengths: number of tokens of each document `[documents]`.
        tokens: concatenated ids `[tokens]`.
        mask: loss mask, uint8 `[tokens]`; None if the store has no mask.
        fields: name of a field -> number of each document, float32 `[documents]`.
    """

    first: int
    lengths: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray | None
    fields: Mapping[str, np.ndarray] = field(default_factory=dict)

    def select(self, keep: np.ndarray) -> Block:
        """Returns a block of the documents for which `keep` (bool `[documents]`) is true."""
        if keep.all():
            return self
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        edges = np.flatnonzero(np.diff(keep, prepend=False, append=False))
        runs = [slice(a, b) for a, b in ends[edges].reshape(-1, 2).tolist()]

        def kept(array: np.ndarray) -> np.ndarray:
            return np.concatenate([array[run] for run in runs]) if runs else array[:0]

        fields = {name: values[keep] for name, values in self.fields.items()}
        return Block(-1, self.lengths[keep], kept(self.tokens), None if self.mask is None else kept(self.mask), fields)

    def documents(self) -> Iterator[np.ndarray]:
        """Yields each document's ids."""
        end = 0
        for length in self.lengths.tolist():
            yield self.tokens[end : end + length]
            end += length


def open_items(path: str | Path) -> TokenStore:
    """Opens a store, and checks that a store of preferences contains complete pairs.

    Raises:
        UserError: `path` is not a store, or the store is damaged or has an odd number of documents of preferences.
    """
    store = TokenStore(path)
    if store.num_documents % store.info.item_documents:
        raise UserError(
            f"damaged: its {store.num_documents:,} documents are not complete preference pairs; pack the store again",
            path,
        )
    return store


def scan(store: TokenStore, on_tokens: Callable[[int], None] = lambda done: None) -> Iterator[Block]:
    """Yields all documents of a store in order, in blocks. A preference pair is never split between blocks.

    Args:
        on_tokens: function that is called after each block with the number of tokens read so far.
    """
    for first, stop, start, end in document_blocks(store.lengths, store.info.item_documents):
        lengths = np.array(store.lengths[first:stop], np.int64)
        mask = None if store.loss_mask is None else store.loss_mask[start:end]
        fields = {name: np.array(values[first:stop]) for name, values in store.fields.items()}
        yield Block(first, lengths, store.tokens[start:end], mask, fields)
        release_pages(store.tokens, store.loss_mask, store.lengths)
        on_tokens(end)


def read_ranges(file: BinaryIO, starts: np.ndarray, sizes: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Reads byte ranges of a file, and returns the concatenated ranges as an array of `dtype`.

    Does not use a memory map, which would load 64 KB around each range.

    Args:
        file: a file opened without buffering.
        starts, sizes: start and size of each range, in bytes.
    """
    array = np.empty(int(sizes.sum()) // dtype.itemsize, dtype)
    buffer, at = array.data.cast("B"), 0
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        file.seek(start)
        end = at + size
        while at < end:
            if not (count := file.readinto(buffer[at:end])):  # type: ignore[attr-defined]
                raise UserError(
                    "unexpected end of file: the file was changed while it was being read; repeat the command",
                    file.name,
                )
            at += count
    return array

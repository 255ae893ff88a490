"""A store read in blocks of documents, with bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.config.errors import UserError
from weft.data.indexed import release, spans
from weft.data.store import TokenStore


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
        kept = np.repeat(keep, self.lengths)
        return Block(-1, self.lengths[keep], self.tokens[kept], None if self.mask is None else self.mask[kept])

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
        mask = None if store.loss_mask is None else store.loss_mask[start:end]
        yield Block(first, lengths, store.tokens[start:end], mask)
        release(store.tokens, store.loss_mask, store.lengths)
        on_tokens(end)

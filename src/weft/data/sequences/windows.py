"""Defines the dataset of consecutive windows over the concatenated tokens of a token store."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.data.stores.store import TokenStore
from weft.errors import UserError
from weft.formatting import counted


class StoreDataset:
    """A dataset of the windows of a token store: sample `i` is `tokens[i * length : (i + 1) * length + 1]`.

    The weight of a label is its token's loss mask, or 1 if the store has no mask.

    Args:
        sequence_length: `length` above, the number of inputs in a window.
        document_attention: whether attention is limited to documents. If so, samples also have `segments` (the
            index of each token's document in the window), and positions restart at each document. The label of a
            document's last token, which is the first token of the next document, has weight 0. The pieces of a document
            in several windows are treated as separate documents, with positions from 0.

    Raises:
        UserError: the store is shorter than one window.
    """

    complete = True

    def __init__(self, store: TokenStore, sequence_length: int, *, document_attention: bool = False):
        self.store, self.length, self.document_attention = store, sequence_length, document_attention
        self.samples = (store.num_tokens - 1) // sequence_length
        if self.samples < 1:
            raise UserError(
                f"the store has {counted(store.num_tokens, 'token')}, but one sequence and its last label need "
                f"{sequence_length + 1}; shorten data.sequence_length or pack more text",
                store.path,
            )

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        begin, end = index * self.length, (index + 1) * self.length
        window = np.asarray(self.store.tokens[begin : end + 1], np.int64)
        mask = self.store.loss_mask
        weight = np.ones(self.length, np.float32) if mask is None else mask[begin + 1 : end + 1].astype(np.float32)
        sample = {"tokens": window[:-1], "labels": window[1:], "weight": weight}
        positions = np.arange(self.length, dtype=np.int64)
        if not self.document_attention:
            return sample | {"positions": positions}
        # Positions in 1 .. length at which another document begins; at `length` it begins with the last label.
        starts = document_starts(self.store, begin + 1, end + 1) - begin
        weight[starts - 1] = 0
        inside = starts[starts < self.length]
        begins = np.zeros(self.length, np.int64)
        begins[inside] = 1
        segments = begins.cumsum()
        return sample | {"segments": segments, "positions": positions - np.concatenate(([0], inside))[segments]}

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns samples, stacked `[n, seq]`."""
        if self.document_attention:
            samples = [self[index] for index in indices.tolist()]
            return {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}
        count, length, mask = len(indices), self.length, self.store.loss_mask
        stored = self.store.tokens
        tokens, labels = np.empty((count, length), np.int64), np.empty((count, length), np.int64)
        weight = np.empty((count, length), np.float32)
        weight.fill(1)
        for i, begin in enumerate((indices * length).tolist()):
            tokens[i] = stored[begin : begin + length]
            labels[i] = stored[begin + 1 : begin + length + 1]
            if mask is not None:
                weight[i] = mask[begin + 1 : begin + length + 1]
        positions = np.empty((count, length), np.int64)
        positions[:] = np.arange(length)
        return {"tokens": tokens, "labels": labels, "weight": weight, "positions": positions}

    def where(self, index: int) -> str:
        """Describes the origin of a sample, for messages."""
        begin = index * self.length
        document = first_at_or_after(self.store.offsets, begin * self.store.tokens.dtype.itemsize + 1) - 1
        return f"document {document:,} of {self.store.path} (token {begin:,})"


def document_starts(store: TokenStore, begin: int, end: int) -> np.ndarray:
    """Returns the positions of the tokens in `begin .. end - 1` that begin a document, ascending and unique, int64.

    Uses two binary searches in the index, so the time hardly depends on the size of the store.
    """
    size = store.tokens.dtype.itemsize
    first, last = (first_at_or_after(store.offsets, place * size) for place in (begin, end))
    starts = store.offsets[first:last].astype(np.int64) // size
    return starts[np.diff(starts, prepend=-1) > 0]  # a document without tokens begins where the next one does


def first_at_or_after(values: np.ndarray, least: int) -> int:
    """Returns the index of the first of the ascending `values` that is at least `least`; `len(values)` if none is.

    `np.searchsorted` would first copy the entire memory map, because the numbers in an index file are not aligned.
    """
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] < least:
            low = middle + 1
        else:
            high = middle
    return low

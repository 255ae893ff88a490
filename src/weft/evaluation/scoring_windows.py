"""What is read and what is predicted when a store is measured: each token once, in windows of bounded length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from weft.data.stores.store import TokenStore

BLOCK = 1 << 16  # documents whose places are looked up at once
POOL = 16  # batches among which windows of like lengths are looked for


class Window(NamedTuple):
    """Tokens `begin .. end - 1` of a store, of which those from `first` on are predicted."""

    begin: int
    first: int
    end: int


def windows(store: TokenStore, length: int, stride: int, *, apart: bool, limit: int | None = None) -> Iterator[Window]:
    """Windows in which each token but the first of its document (or of the store) is predicted exactly once.

    A document's first window predicts up to `length` tokens; each later one begins `stride` tokens after the one before
    it and predicts what that one had no room for, so at least `length - stride` tokens stand before each of these.

    Args:
        length: the most inputs of a window.
        stride: in 1 .. `length`; `length`: no token is read twice.
        apart: every document by itself; else the whole store is one.
        limit: stop after so many predictions.
    """
    left = count(store, apart=apart) if limit is None else limit
    for begin, stop in _documents(store) if apart else [(0, store.num_tokens)]:
        first = begin + 1
        while first < stop and left > 0:
            end = min(begin + length + 1, stop, first + left)
            yield Window(begin, first, end)
            left -= end - first
            first, begin = end, begin + stride
        if left <= 0:
            return


def count(store: TokenStore, *, apart: bool) -> int:
    """How many tokens all `windows` of a store predict."""
    if not apart:
        return max(store.num_tokens - 1, 0)
    starts = range(0, store.num_documents, BLOCK)
    return sum(int(np.maximum(store.lengths[start : start + BLOCK] - 1, 0).sum(dtype=np.int64)) for start in starts)


def _documents(store: TokenStore) -> Iterator[tuple[int, int]]:
    """First token and the one after the last, of every document."""
    for start in range(0, store.num_documents, BLOCK):
        begins = store.offsets[start : start + BLOCK] // store.tokens.dtype.itemsize
        yield from zip(begins.tolist(), (begins + store.lengths[start : start + BLOCK]).tolist(), strict=True)


def batches(store: TokenStore, found: Iterator[Window], tokens: int) -> Iterator[dict[str, Any]]:
    """Windows side by side, those of like lengths together, filled up behind their ends.

    What comes after a token changes nothing for it, so the filling needs no mask.

    Args:
        tokens: the most inputs of a batch, filling among them; a longer window has a batch to itself.

    Yields:
        `tokens`, `labels`: int64 `[rows, seq]`; `weight`: float32 `[rows, seq]`, the loss mask where a label is
        predicted here, else 0; `predicted`: how many are.
    """
    pool: list[Window] = []
    held = 0
    for window in found:
        pool.append(window)
        held += window.end - window.begin - 1
        if held >= POOL * tokens:
            yield from _side_by_side(store, pool, tokens)
            pool, held = [], 0
    yield from _side_by_side(store, pool, tokens)


def _side_by_side(store: TokenStore, pool: list[Window], tokens: int) -> Iterator[dict[str, Any]]:
    pool = sorted(pool, key=lambda window: (window.begin - window.end, window.begin))
    while pool:
        width = pool[0].end - pool[0].begin - 1
        rows = max(1, tokens // width)
        yield _stacked(store, pool[:rows], width)
        pool = pool[rows:]


def _stacked(store: TokenStore, chosen: list[Window], width: int) -> dict[str, Any]:
    ids = np.zeros((2, len(chosen), width), np.int64)
    weight = np.zeros((len(chosen), width), np.float32)
    for row, (begin, first, end) in enumerate(chosen):
        inputs = end - begin - 1
        ids[0, row, :inputs] = store.tokens[begin : end - 1]
        ids[1, row, :inputs] = store.tokens[begin + 1 : end]
        weight[row, first - begin - 1 : inputs] = 1 if store.loss_mask is None else store.loss_mask[first:end]
    predicted = sum(window.end - window.first for window in chosen)
    return {"tokens": ids[0], "labels": ids[1], "weight": weight, "predicted": predicted}

"""Splits a token store into windows in which each token is predicted exactly once, and batches the windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from weft.data.stores.store import TokenStore

BLOCK = 1 << 16  # number of documents whose offsets are read at a time
POOL = 16  # number of batches among which windows are sorted by length


class Window(NamedTuple):
    """A window over the tokens `begin .. end - 1` of a store. It predicts the tokens `first .. end - 1`."""

    begin: int
    first: int
    end: int


def scoring_windows(
    store: TokenStore, length: int, stride: int, *, apart: bool, limit: int | None = None
) -> Iterator[Window]:
    """Yields windows over a store. Every token except the first token of each document is predicted exactly once.

    A document's first window predicts up to `length` tokens. Each later window begins `stride` tokens after the
    previous window and predicts the tokens after the previous window's end. So each of these tokens has at least
    `length - stride` tokens of context.

    Args:
        length: maximum number of input tokens of a window.
        stride: distance in tokens between windows, in 1 .. `length`; if it is `length`, no token is read twice.
        apart: whether to treat every document separately. If False, the store is treated as one document.
        limit: maximum number of predictions.
    """
    left = count_predictions(store, apart=apart) if limit is None else limit
    for begin, stop in _documents(store) if apart else [(0, store.num_tokens)]:
        first = begin + 1
        while first < stop and left > 0:
            end = min(begin + length + 1, stop, first + left)
            yield Window(begin, first, end)
            left -= end - first
            first, begin = end, begin + stride
        if left <= 0:
            return


def count_predictions(store: TokenStore, *, apart: bool) -> int:
    """Returns the number of tokens that the windows of a store predict, without a limit.

    Args:
        apart: whether documents are treated separately. If True, the first token of each document is not predicted; if
            False, only the first token of the store is not predicted.
    """
    if not apart:
        return max(store.num_tokens - 1, 0)
    starts = range(0, store.num_documents, BLOCK)
    return sum(int(np.maximum(store.lengths[start : start + BLOCK] - 1, 0).sum(dtype=np.int64)) for start in starts)


def _documents(store: TokenStore) -> Iterator[tuple[int, int]]:
    """Yields the token positions (start, end) of every document; `end` is exclusive."""
    for start in range(0, store.num_documents, BLOCK):
        begins = store.offsets[start : start + BLOCK] // store.tokens.dtype.itemsize
        yield from zip(begins.tolist(), (begins + store.lengths[start : start + BLOCK]).tolist(), strict=True)


def scoring_batches(store: TokenStore, windows: Iterator[Window], tokens: int) -> Iterator[dict[str, Any]]:
    """Yields right-padded batches of windows with similar lengths. With causal attention, padding needs no mask.

    Args:
        tokens: maximum number of input tokens of a batch, including padding. A longer window forms a batch by itself.

    Yields:
        A dict with `tokens` and `labels`, int64 `[batch, seq]`; `weight`, float32 `[batch, seq]`, the loss mask of
        predicted labels and 0 for other labels; and `predicted`, the number of predictions.
    """
    pool: list[Window] = []
    size = 0
    for window in windows:
        pool.append(window)
        size += window.end - window.begin - 1
        if size >= POOL * tokens:
            yield from _batches_by_length(store, pool, tokens)
            pool, size = [], 0
    yield from _batches_by_length(store, pool, tokens)


def _batches_by_length(store: TokenStore, pool: list[Window], tokens: int) -> Iterator[dict[str, Any]]:
    pool = sorted(pool, key=lambda window: (window.begin - window.end, window.begin))
    while pool:
        width = pool[0].end - pool[0].begin - 1
        count = max(1, tokens // width)
        yield _batch(store, pool[:count], width)
        pool = pool[count:]


def _batch(store: TokenStore, windows: list[Window], width: int) -> dict[str, Any]:
    ids = np.zeros((2, len(windows), width), np.int64)
    weight = np.zeros((len(windows), width), np.float32)
    for row, (begin, first, end) in enumerate(windows):
        inputs = end - begin - 1
        ids[0, row, :inputs] = store.tokens[begin : end - 1]
        ids[1, row, :inputs] = store.tokens[begin + 1 : end]
        weight[row, first - begin - 1 : inputs] = 1 if store.loss_mask is None else store.loss_mask[first:end]
    predicted = sum(window.end - window.first for window in windows)
    return {"tokens": ids[0], "labels": ids[1], "weight": weight, "predicted": predicted}

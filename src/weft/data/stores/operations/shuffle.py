"""A store's documents in a random order that a seed fixes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from weft.data.permutation import Permutation
from weft.data.stores.indexed import BLOCK_DOCUMENTS, BLOCK_TOKENS, release
from weft.data.stores.operations.new_store import Made, Output, Part, arguments_of, make
from weft.data.stores.operations.scan import Block, open_items, read_parts
from weft.data.stores.store import TokenStore


def shuffle(path: str | Path, output: Output, *, seed: int = 0) -> Made:
    """Write the documents of a store in another order; pairs stay together.

    The order is a keyed permutation, so it is never in memory as a whole. Documents are read where they lie: a store
    larger than memory should be on a disk that reads from anywhere.

    Raises:
        UserError: no store, or something else at `out`.
    """
    store = open_items(path)
    step = store.info.item_documents
    order = Permutation(store.num_documents // step, seed)

    def fill(part: Part) -> None:
        with ExitStack() as stack:
            names = ["tokens.bin"] + ["loss_mask.bin"] * (store.loss_mask is not None)
            files: list[BinaryIO] = [stack.enter_context(open(store.path / name, "rb", buffering=0)) for name in names]
            bar = stack.enter_context(output.console.progress(store.num_tokens, "shuffling", unit="token"))
            for start in range(0, order.n, BLOCK_DOCUMENTS // step):
                items = order(np.arange(start, min(start + BLOCK_DOCUMENTS // step, order.n)))
                numbers = (items[:, None] * step + np.arange(step)).reshape(-1)
                for block in _gather(store, files, numbers):
                    part.add(block)
                bar.update(part.writer.tokens)

    made_from = arguments_of(store, "shuffle", seed=seed)
    return make(store, output, made_from, fill)


def _gather(store: TokenStore, files: list[BinaryIO], numbers: np.ndarray) -> Iterator[Block]:
    """The documents of these numbers, in this order, in blocks.

    Args:
        files: of the tokens and, where there is one, of the mask.
    """
    lengths = np.asarray(store.lengths[numbers], np.int64)
    starts = np.asarray(store.offsets[numbers]) // store.tokens.dtype.itemsize
    release(store.lengths, store.offsets)
    ends = np.cumsum(lengths)
    first, begin = 0, 0
    while first < len(numbers):
        stop = max(int(np.searchsorted(ends, begin + BLOCK_TOKENS, side="right")), first + 1)
        arrays = [
            read_parts(file, starts[first:stop] * dtype.itemsize, lengths[first:stop] * dtype.itemsize, dtype)
            for file, dtype in zip(files, (store.tokens.dtype, np.dtype(np.uint8)), strict=False)
        ]
        yield Block(-1, lengths[first:stop], arrays[0], arrays[1] if len(arrays) > 1 else None)
        first, begin = stop, int(ends[stop - 1])

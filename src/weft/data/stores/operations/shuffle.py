"""Shuffles a store's documents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from weft.data.permutation import Permutation
from weft.data.stores.indexed import BLOCK_DOCUMENTS, BLOCK_TOKENS, release_pages
from weft.data.stores.operations.new_store import Output, StoreWriter, WrittenStore, make_store, provenance
from weft.data.stores.operations.scan import Block, open_items, read_ranges
from weft.data.stores.store import TokenStore


def shuffle(path: str | Path, output: Output, *, seed: int = 0) -> WrittenStore:
    """Writes a store's documents to a new store in random order. The documents of a preference pair stay together.

    The order is a pseudorandom permutation that is computed on access and needs no memory. Documents are read by random
    access, so a store larger than memory should not be on a hard disk drive.

    Args:
        seed: seed of the permutation.

    Raises:
        UserError: `path` is not a store, or `output.path` exists and must not be replaced.
    """
    store = open_items(path)
    step = store.info.item_documents
    order = Permutation(store.num_documents // step, seed)

    def fill(writer: StoreWriter) -> None:
        with ExitStack() as stack:
            names = ["tokens.bin"] + ["loss_mask.bin"] * (store.loss_mask is not None)
            files: list[BinaryIO] = [stack.enter_context(open(store.path / name, "rb", buffering=0)) for name in names]
            bar = stack.enter_context(output.console.progress(store.num_tokens, "shuffling", unit="token"))
            for start in range(0, order.n, BLOCK_DOCUMENTS // step):
                items = order(np.arange(start, min(start + BLOCK_DOCUMENTS // step, order.n)))
                numbers = (items[:, None] * step + np.arange(step)).reshape(-1)
                for block in _read_documents(store, files, numbers):
                    writer.add(block)
                bar.update(writer.writer.tokens)

    return make_store(store, output, provenance(store, "shuffle", seed=seed), fill)


def _read_documents(store: TokenStore, files: list[BinaryIO], numbers: np.ndarray) -> Iterator[Block]:
    """Yields blocks of a store's documents, in the order of `numbers`.

    Args:
        files: `tokens.bin` and, if the store has a loss mask, `loss_mask.bin`, opened without buffering.
        numbers: indices of the documents in the store.
    """
    lengths = np.asarray(store.lengths[numbers], np.int64)
    starts = np.asarray(store.offsets[numbers]) // store.tokens.dtype.itemsize
    release_pages(store.lengths, store.offsets)
    ends = np.cumsum(lengths)
    first, begin = 0, 0
    while first < len(numbers):
        stop = max(int(np.searchsorted(ends, begin + BLOCK_TOKENS, side="right")), first + 1)
        arrays = [
            read_ranges(file, starts[first:stop] * dtype.itemsize, lengths[first:stop] * dtype.itemsize, dtype)
            for file, dtype in zip(files, (store.tokens.dtype, np.dtype(np.uint8)), strict=False)
        ]
        fields = {name: values[numbers[first:stop]] for name, values in store.fields.items()}
        yield Block(-1, lengths[first:stop], arrays[0], arrays[1] if len(arrays) > 1 else None, fields)
        first, begin = stop, int(ends[stop - 1])

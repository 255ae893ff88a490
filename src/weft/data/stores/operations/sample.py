"""Draws a random sample of a store's documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from weft.data.permutation import Permutation
from weft.data.stores.operations.new_store import Output, StoreWriter, WrittenStore, make_store, provenance
from weft.data.stores.operations.scan import open_items, scan
from weft.errors import UserError


def sample(
    path: str | Path,
    output: Output,
    *,
    documents: int | None = None,
    fraction: float | None = None,
    seed: int = 0,
) -> WrittenStore:
    """Draws documents uniformly without replacement, and writes them to a new store in their original order.

    Exactly one of `documents` and `fraction` must be set.

    Args:
        documents: number of documents to draw (of pairs, for a store of preferences).
        fraction: fraction of all documents to draw; the resulting number is rounded.
        seed: seed of the random choice.

    Raises:
        UserError: `path` is not a store or has fewer documents, `documents` and `fraction` are both set or both None,
            or `output.path` exists and must not be replaced.
    """
    store = open_items(path)
    step = store.info.item_documents
    items = store.num_documents // step
    if (documents is None) == (fraction is None):
        raise UserError("set either --documents or --fraction")
    if fraction is not None and not 0 < fraction <= 1:
        raise UserError(f"--fraction {fraction:g}: must be above 0 and at most 1")
    wanted = round(fraction * items) if fraction is not None else documents
    assert wanted is not None
    if not 0 < wanted <= items:
        raise UserError(
            f"cannot draw {wanted:,} {'preference pairs' if step > 1 else 'documents'}: the store has {items:,}; "
            f"choose a number from 1 to {items:,}",
            path,
        )
    order = Permutation(items, seed)

    def fill(writer: StoreWriter) -> None:
        with output.console.progress(store.num_tokens, "drawing", unit="token") as bar:
            for block in scan(store, bar.update):
                first = block.first // step
                drawn = order(np.arange(first, first + len(block.lengths) // step)) < wanted
                writer.add_selected(block, np.repeat(drawn, step), "not drawn")

    return make_store(store, output, provenance(store, "sample", documents=wanted * step, seed=seed), fill)

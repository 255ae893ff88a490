"""Draws a random sample of a store's documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from weft.data.permutation import Permutation
from weft.data.stores.operations.new_store import Output, StoreResult, StoreWriter, make_store, provenance
from weft.data.stores.operations.scan import open_items, scan
from weft.errors import UserError


def sample(
    path: str | Path,
    output: Output,
    *,
    documents: int | None = None,
    fraction: float | None = None,
    seed: int = 0,
) -> StoreResult:
    """Draws documents uniformly without replacement and writes them in their original order.

    Args:
        documents: exact number of documents (pairs, for preferences).
        fraction: or their fraction of all, rounded to a number.

    Raises:
        UserError: not a store, more documents than it has, or something else at the output.
    """
    store = open_items(path)
    step = store.info.item_documents
    items = store.num_documents // step
    if (documents is None) == (fraction is None):
        raise UserError("give one of --documents and --fraction")
    if fraction is not None and not 0 < fraction <= 1:
        raise UserError(f"--fraction {fraction:g}: must be above 0 and at most 1")
    wanted = round(fraction * items) if fraction is not None else documents
    assert wanted is not None
    if not 0 < wanted <= items:
        raise UserError(f"cannot draw {wanted:,} of {items:,}; ask for 1 to {items:,}", path)
    order = Permutation(items, seed)

    def fill(writer: StoreWriter) -> None:
        with output.console.progress(store.num_tokens, "drawing", unit="token") as bar:
            for block in scan(store, bar.update):
                first = block.first // step
                drawn = order(np.arange(first, first + len(block.lengths) // step)) < wanted
                writer.add_selected(block, np.repeat(drawn, step), "not drawn")

    return make_store(store, output, provenance(store, "sample", documents=wanted * step, seed=seed), fill)

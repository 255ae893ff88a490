"""Some of a store's documents, drawn at random."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from weft.data.permutation import Permutation
from weft.data.stores.operations.new_store import Made, Output, Part, arguments_of, make
from weft.data.stores.operations.scan import open_items, scan
from weft.errors import UserError

NOT_DRAWN = "not drawn"


def sample(
    path: str | Path,
    output: Output,
    *,
    documents: int | None = None,
    fraction: float | None = None,
    seed: int = 0,
) -> Made:
    """Draw so many documents, each as likely as any other, without putting back; they keep their order.

    Args:
        documents: exactly so many (of preferences: pairs).
        fraction: or this share of all, rounded.

    Raises:
        UserError: no store, more documents than it has, or something else at `out`.
    """
    store = open_items(path)
    step = store.info.item_documents
    items = store.num_documents // step
    if (documents is None) == (fraction is None):
        raise UserError("name one of --documents and --fraction")
    if fraction is not None and not 0 < fraction <= 1:
        raise UserError(f"--fraction {fraction:g}: a number above 0, of at most 1, is needed")
    wanted = round(fraction * items) if fraction is not None else documents
    assert wanted is not None
    if not 0 < wanted <= items:
        raise UserError(f"{wanted:,} of {items:,} cannot be drawn; ask for 1 to {items:,}", path)
    order = Permutation(items, seed)

    def fill(part: Part) -> None:
        with output.console.progress(store.num_tokens, "drawing", unit="token") as bar:
            for block in scan(store, bar.update):
                first = block.first // step
                drawn = order(np.arange(first, first + len(block.lengths) // step)) < wanted
                part.add_some(block, np.repeat(drawn, step), NOT_DRAWN)

    made_from = arguments_of(store, "sample", documents=wanted * step, seed=seed)
    return make(store, output, made_from, fill)

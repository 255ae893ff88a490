"""Splits a store, for example into training and validation data. Equal documents are always in the same split."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from weft.data.stores.operations.new_store import Output, StoreWriter, WrittenStore, make_stores, provenance
from weft.data.stores.operations.scan import Block, open_items, scan
from weft.errors import UserError


def split(
    path: str | Path, output: Output, outs: Sequence[Path], fractions: Sequence[float], *, seed: int = 0
) -> list[WrittenStore]:
    """Splits a store into several stores. Assigns each document to a split by a keyed hash of its ids.

    The assignment depends only on the document and the seed. So a document stays in its split when the store grows, and
    copies of a document are in the same split. The sizes of the splits are close to the fractions, but not exact.

    Args:
        output: settings; `output.path` is not used.
        outs: folder of each split.
        fractions: fraction of the documents in each split; the sum is 1.
        seed: key of the hash.

    Raises:
        UserError: `path` is not a store, the fractions do not sum to 1, or a path in `outs` exists and must not be
            replaced.
    """
    if len(outs) != len(fractions) or len(set(outs)) != len(outs) or len(outs) < 2:
        raise UserError(f"{len(fractions)} fractions for {len(outs)} folders; set a different --out for each fraction")
    if min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-6:
        raise UserError(f"--fractions {' '.join(f'{f:g}' for f in fractions)}: must be above 0 and sum to 1")
    store = open_items(path)
    step = store.info.item_documents
    limits = np.cumsum(fractions)[:-1]

    def fill(writers: list[StoreWriter]) -> None:
        with output.console.progress(store.num_tokens, "splitting", unit="token") as bar:
            for block in scan(store, bar.update):
                keys = np.frombuffer(b"".join(digests(block, step, seed)), "<u8")[::2]
                assigned = np.searchsorted(limits, (keys >> np.uint64(11)) / 2.0**53, side="right")
                for number, writer in enumerate(writers):
                    writer.add_selected(block, np.repeat(assigned == number, step), "in another split")

    made_from = [
        provenance(store, "split", fractions=list(fractions), part=number, seed=seed) for number in range(len(outs))
    ]
    return make_stores(store, output, list(zip(outs, made_from, strict=True)), fill)


def digests(block: Block, step: int = 1, seed: int = 0) -> Iterator[bytes]:
    """Yields a 16-byte BLAKE2b digest of each item's ids.

    Args:
        step: number of documents per item: 2 for preference pairs, else 1.
        seed: key of the digest.
    """
    keyed = hashlib.blake2b(digest_size=16, key=seed.to_bytes(8, "little", signed=True))
    data = np.ascontiguousarray(block.tokens).data.cast("B")
    ends = (np.cumsum(block.lengths) * block.tokens.itemsize).tolist()
    begin = 0
    for number in range(step - 1, len(ends), step):
        digest = keyed.copy()
        if step > 1:  # the boundary within a pair is part of its content
            digest.update((ends[number - 1] - begin).to_bytes(8, "little"))
        digest.update(data[begin : ends[number]])
        yield digest.digest()
        begin = ends[number]

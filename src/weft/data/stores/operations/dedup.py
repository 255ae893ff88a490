"""Removes duplicates from a store: of equal (or nearly equal) documents, only the first is kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.stores.indexed import release_pages
from weft.data.stores.operations.equal_keys import Groups
from weft.data.stores.operations.near import NearDuplicates
from weft.data.stores.operations.new_store import Output, StoreWriter, WrittenStore, make_store, provenance
from weft.data.stores.operations.scan import open_items, scan
from weft.data.stores.operations.split import digests
from weft.data.stores.store import TokenStore
from weft.observe.console import Console

Similarity = Callable[
    [np.ndarray, np.ndarray], np.ndarray
]  # items a and b of each pair -> similarity of each pair, 0 .. 1


def dedup(
    path: str | Path,
    output: Output,
    *,
    near: bool = False,
    threshold: float = 0.8,
    ngram: int = 5,
) -> WrittenStore:
    """Writes a store without duplicates, and `duplicates.jsonl`, which lists them.

    Each line of `duplicates.jsonl` has the keys `document` (index of the removed document in the input store),
    `duplicate_of` (index of the document that is kept instead), and `similarity` (of the two documents).

    Args:
        near: whether to remove near duplicates too (`NearDuplicates`), not only documents with the same ids.
        threshold: minimum similarity of near duplicates.
        ngram: number of tokens per n-gram, for near duplicates.

    Raises:
        UserError: `path` is not a store, `output.path` exists and must not be replaced, `threshold` or `ngram` is out
            of range, or rensa is not installed (for `near`).
    """
    store = open_items(path)
    if near:
        NearDuplicates.check(threshold, ngram)
        how: dict[str, Any] = {"near": {"threshold": threshold, "ngram": ngram, **NearDuplicates.settings()}}
    else:
        how = {"exact": True}
    items = store.num_documents // store.info.item_documents

    def fill(writer: StoreWriter) -> None:
        work = writer.folder / "work"
        work.mkdir()
        first_of = np.memmap(work / "first_of", np.int64, "w+", shape=(items,))
        if near:
            similarity = NearDuplicates(store, work, threshold, ngram, output.console).find(first_of)
        else:
            similarity = _find_exact(store, work, first_of, output.console)
        _write(store, writer, first_of, similarity, "near duplicates" if near else "duplicates", output.console)
        shutil.rmtree(work)

    return make_store(store, output, provenance(store, "dedup", **how), fill)


def _find_exact(store: TokenStore, work: Path, first_of: np.ndarray, console: Console) -> Similarity:
    """Sets `first_of[i]` to the index of the first item with the same ids as item `i`, for all `i`.

    An item is a document, or a pair of documents in a store of preferences.

    Args:
        work: a folder for temporary files.

    Returns:
        A function that returns the similarity of two items with the same ids, which is always 1.
    """
    step = store.info.item_documents
    groups = Groups(work, len(first_of), columns=2)
    with console.progress(store.num_tokens, "comparing", unit="token") as bar:
        for block in scan(store, bar.update):
            first, count = block.first // step, len(block.lengths) // step
            keys = np.frombuffer(b"".join(digests(block, step)), "<u8").reshape(-1, 2)
            first_of[first : first + count] = np.arange(first, first + count)
            release_pages(first_of)
            groups.add(keys, first)
    for numbers, group in groups.equal():
        starts = np.concatenate([[True], group[1:] != group[:-1]])
        first_of[numbers] = numbers[starts][np.cumsum(starts) - 1]
        release_pages(first_of)
    return lambda kept, duplicates: np.ones(len(kept))


def _write(
    store: TokenStore, writer: StoreWriter, first_of: np.ndarray, similarity: Similarity, reason: str, console: Console
) -> None:
    step = store.info.item_documents
    with (
        open(writer.folder / "duplicates.jsonl", "w", encoding="utf-8") as file,
        console.progress(store.num_tokens, "writing", unit="token") as bar,
    ):
        for block in scan(store, bar.update):
            first, count = block.first // step, len(block.lengths) // step
            numbers, firsts = np.arange(first, first + count), np.array(first_of[first : first + count])
            release_pages(first_of)
            keep = numbers == firsts
            writer.add_selected(block, np.repeat(keep, step), reason)
            removed, kept = numbers[~keep], firsts[~keep]
            for a, b, s in zip(removed.tolist(), kept.tolist(), similarity(kept, removed).tolist(), strict=True):
                line = {"document": a * step, "duplicate_of": b * step, "similarity": round(s, 3)}
                file.write(json.dumps(line) + "\n")

"""A store without copies: the first of equal, or of nearly equal, documents is kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.stores.indexed import release
from weft.data.stores.operations.equal_keys import Groups
from weft.data.stores.operations.near import NearDuplicates
from weft.data.stores.operations.new_store import Made, Output, Part, arguments_of, make
from weft.data.stores.operations.scan import open_items, scan
from weft.data.stores.operations.split import digests
from weft.data.stores.store import TokenStore
from weft.errors import UserError
from weft.observe.console import Console


def dedup(
    path: str | Path,
    output: Output,
    *,
    near: bool = False,
    threshold: float = 0.8,
    ngram: int = 5,
) -> Made:
    """Write a store without its duplicates, and `duplicates.jsonl`: document, duplicate_of, similarity.

    Args:
        near: leave out also what is nearly equal, as `NearDuplicates` says; otherwise only what has the same ids.
        threshold, ngram: of near duplicates.

    Raises:
        UserError: no store, something else at `out`, or (for `near`) no rensa.
    """
    store = open_items(path)
    if near:
        NearDuplicates.check(threshold, ngram)
        how: dict[str, Any] = {"near": {"threshold": threshold, "ngram": ngram, **NearDuplicates.settings()}}
    else:
        how = {"exact": True}
    items = store.num_documents // store.info.item_documents

    def fill(part: Part) -> None:
        work = part.folder / "work"
        work.mkdir()
        first_of = np.memmap(work / "first_of", np.int64, "w+", shape=(items,))
        if near:
            similarity = NearDuplicates(store, work, threshold, ngram, output.console).find(first_of)
        else:
            similarity = _exact(store, work, first_of, output.console)
        _write(store, part, first_of, similarity, "near duplicates" if near else "duplicates", output.console)
        shutil.rmtree(work)

    made_from = arguments_of(store, "dedup", **how)
    return make(store, output, made_from, fill)


def _exact(store: TokenStore, work: Path, first_of: np.ndarray, console: Console):
    """Say of each item which is the first with the same ids: `first_of` `[items]`."""
    step = store.info.item_documents
    groups = Groups(work, len(first_of), columns=2)
    with console.progress(store.num_tokens, "comparing", unit="token") as bar:
        for block in scan(store, bar.update):
            first, count = block.first // step, len(block.lengths) // step
            keys = np.frombuffer(b"".join(digests(block, step)), "<u8").reshape(-1, 2)
            first_of[first : first + count] = np.arange(first, first + count)
            release(first_of)
            groups.add(keys, first)
    for numbers, group in groups.equal():
        starts = np.concatenate([[True], group[1:] != group[:-1]])
        first_of[numbers] = numbers[starts][np.cumsum(starts) - 1]
        release(first_of)
    return lambda kept, duplicates: np.ones(len(kept))


def _write(store: TokenStore, part: Part, first_of: np.ndarray, similarity, reason: str, console: Console) -> None:
    step = store.info.item_documents
    with (
        open(part.folder / "duplicates.jsonl", "w", encoding="utf-8") as file,
        console.progress(store.num_tokens, "writing", unit="token") as bar,
    ):
        for block in scan(store, bar.update):
            first, count = block.first // step, len(block.lengths) // step
            numbers, firsts = np.arange(first, first + count), np.array(first_of[first : first + count])
            release(first_of)
            keep = numbers == firsts
            if keep.any():
                part.add(block.choose(np.repeat(keep, step)))
            gone, kept = numbers[~keep], firsts[~keep]
            if not len(gone):
                continue
            part.left_out[reason] += step * len(gone)
            for a, b, s in zip(gone.tolist(), kept.tolist(), similarity(kept, gone).tolist(), strict=True):
                line = {"document": a * step, "duplicate_of": b * step, "similarity": round(s, 3)}
                file.write(json.dumps(line) + "\n")
    if part.writer.documents == 0:  # cannot be: the first of all is kept
        raise UserError("no document is left", store.path)

"""A store in parts, say for training and validation: equal documents always go to the same part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from weft.data.stores.operations.new_store import Made, Output, Part, arguments_of, make_all
from weft.data.stores.operations.scan import Block, open_items, scan
from weft.errors import UserError

ELSEWHERE = "in another part"


def split(
    path: str | Path, output: Output, outs: Sequence[Path], fractions: Sequence[float], *, seed: int = 0
) -> list[Made]:
    """Send each document to a part by a keyed hash of its ids.

    So the parts' sizes are near the fractions, not exactly these; a document's part depends on nothing but itself and
    the seed (it is the same in a larger store too), and copies of it are all in one part.

    Args:
        output: how; the folders are `outs`.
        fractions: one for each of `outs`; their sum is 1.

    Raises:
        UserError: no store, fractions that do not add up, or something else at one of `outs`.
    """
    if len(outs) != len(fractions) or len(set(outs)) != len(outs) or len(outs) < 2:
        raise UserError(f"{len(fractions)} fractions for {len(outs)} folders; name a different --out for each")
    if min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-6:
        raise UserError(f"--fractions {' '.join(f'{f:g}' for f in fractions)}: numbers above 0 with sum 1 are needed")
    store = open_items(path)
    step = store.info.item_documents
    limits = np.cumsum(fractions)[:-1]

    def fill(parts: list[Part]) -> None:
        with output.console.progress(store.num_tokens, "splitting", unit="token") as bar:
            for block in scan(store, bar.update):
                keys = np.frombuffer(b"".join(digests(block, step, seed)), "<u8")[::2]
                belongs = np.searchsorted(limits, (keys >> np.uint64(11)) / 2.0**53, side="right")
                for number, part in enumerate(parts):
                    part.add_some(block, np.repeat(belongs == number, step), ELSEWHERE)

    made = [
        (out, arguments_of(store, "split", fractions=list(fractions), part=number, seed=seed))
        for number, out in enumerate(outs)
    ]
    return make_all(store, output, made, fill)


def digests(block: Block, step: int = 1, seed: int = 0) -> Iterator[bytes]:
    """16 bytes for each item, of its documents' ids: BLAKE2b, whose collisions nobody can find."""
    start = hashlib.blake2b(digest_size=16, key=seed.to_bytes(8, "little", signed=True))
    data = np.ascontiguousarray(block.tokens).data.cast("B")
    ends = (np.cumsum(block.lengths) * block.tokens.itemsize).tolist()
    begin = 0
    for number in range(step - 1, len(ends), step):
        digest = start.copy()
        if step > 1:  # where the first ends is part of what a pair is
            digest.update((ends[number - 1] - begin).to_bytes(8, "little"))
        digest.update(data[begin : ends[number]])
        yield digest.digest()
        begin = ends[number]

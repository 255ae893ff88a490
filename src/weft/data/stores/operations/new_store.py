"""Stores made out of a store's documents: they appear whole or not at all, and say what they were made from."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.output_folder import STORE, check_apart, check_out, exists_already, publish
from weft.data.stores.indexed import IndexedWriter
from weft.data.stores.operations.scan import Block
from weft.data.stores.operations.text_bytes import TextBytes
from weft.data.stores.store import SourceFile, StoreInfo, TokenStore
from weft.data.stores.store_json import write_stored
from weft.errors import UserError
from weft.files import hidden_folder, read_json, sync_tree, unwritable
from weft.observe.console import Console


@dataclass(frozen=True)
class Output:
    """Where a new store goes, and how it is made.

    Attributes:
        path: its folder.
        tokenizer: counts the bytes of the text; without it they are known only where all documents are kept.
        overwrite: replace a store that is there; never anything else.
    """

    path: Path
    tokenizer: str | Path | None = None
    overwrite: bool = False
    console: Console = field(default_factory=lambda: Console(speaks=False))


@dataclass(frozen=True)
class Made:
    """A store that an operation made. `seconds` is None if it was there already."""

    path: Path
    info: StoreInfo
    seconds: float | None


def arguments_of(store: TokenStore, operation: str, **arguments: Any) -> dict[str, Any]:
    """What `store.json` says of how the store was made, and by which it is known again."""
    info = store.info
    digests = {"bin_sha256": info.bin_sha256, "idx_sha256": info.idx_sha256, "mask_sha256": info.mask_sha256}
    return {"operation": operation, "input": digests, **arguments}


class Part:
    """A store in the making, of some of `source`'s documents.

    Attributes:
        folder: where its files are for now; an operation may add one.
        left_out: reason -> documents of the source that are not in it.
    """

    def __init__(self, source: TokenStore, folder: Path, counter: TextBytes | None):
        self.source, self.folder, self.counter = source, folder, counter
        self.writer = IndexedWriter(folder / "tokens", source.info.dtype, mask=source.loss_mask is not None)
        self.left_out: Counter[str] = Counter()
        self.bytes = 0

    def add(self, block: Block) -> None:
        """Append a block's documents."""
        self.writer.add(block.tokens, block.lengths, block.mask)
        if self.counter is not None:
            self.bytes += self.counter.count(block.tokens, block.lengths)

    def add_some(self, block: Block, keep: np.ndarray, reason: str) -> None:
        """Append the documents where `keep`, bool [documents], is true; `reason`: why the others are left out."""
        if keep.any():
            self.add(block.choose(keep))
        if left := int(np.count_nonzero(~keep)):
            self.left_out[reason] += left

    def finish(self) -> StoreInfo:
        """Write the index; what `store.json` is to say."""
        writer, old = self.writer, self.source.info
        assert writer.documents + self.left_out.total() == old.documents, "documents got lost"
        whole = writer.documents == old.documents
        source = SourceFile(
            path=str(self.source.path),
            size=old.tokens * self.source.tokens.dtype.itemsize,
            sha256=old.bin_sha256,
            documents=writer.documents,
        )
        idx = writer.finish()
        return StoreInfo(
            kind=old.kind,
            tokenizer_digest=old.tokenizer_digest,
            vocab_size=old.vocab_size,
            eod_id=old.eod_id,
            dtype=old.dtype,
            documents=writer.documents,
            tokens=writer.tokens,
            bytes=self.bytes if self.counter is not None else old.bytes if whole else None,
            empty_documents=writer.empty,
            rejected=dict(self.left_out),
            bin_sha256=writer.digest.hexdigest(),
            idx_sha256=idx,
            mask_sha256=writer.mask_digest.hexdigest() if self.source.loss_mask is not None else None,
            sources=[source],
        )


def make(
    source: TokenStore,
    output: Output,
    made_from: dict[str, Any],
    fill: Callable[[Part], None],
    *,
    reusable: bool = True,
) -> Made:
    """Make a store out of `source`; see `make_all`."""
    fill_all = lambda parts: fill(parts[0])  # noqa: E731
    return make_all(source, output, [(output.path, made_from)], fill_all, reusable=reusable)[0]


def make_all(
    source: TokenStore,
    output: Output,
    outs: Sequence[tuple[Path, dict[str, Any]]],
    fill: Callable[[list[Part]], None],
    *,
    reusable: bool = True,
) -> list[Made]:
    """Make stores out of `source`: each appears by one rename when all are on disk, or not at all.

    Args:
        output: how; its path is that of `outs`, if there is one.
        outs: folders, and what each is made from (`arguments_of`): one that is there already is not made again.
        fill: puts the documents into the parts, one for each of `outs`.
        reusable: whether a store made from the same is as good as a new one.

    Raises:
        UserError: another folder is there, nothing is left for a part, or a full disk.
    """
    tokenizer, overwrite = output.tokenizer, output.overwrite
    for number, (out, _) in enumerate(outs):
        check_out(out, STORE, [source.path], overwrite=overwrite)
        check_apart(out, [other for other, _ in outs[:number]], "other --out")
    there = [up_to_date(out, made_from, overwrite, reusable=reusable) for out, made_from in outs]
    if tokenizer is not None:  # made before without counting the bytes: now they are wanted
        there = [None if info is None or info.bytes is None else info for info in there]
    if all(there):
        return [Made(out, info, None) for (out, _), info in zip(outs, there, strict=True) if info is not None]
    began = time.perf_counter()
    info = source.info
    counter = None if tokenizer is None else TextBytes(tokenizer, info.tokenizer_digest, info.vocab_size)
    with ExitStack() as stack, unwritable(outs[-1][0]):
        folders = [stack.enter_context(hidden_folder(out)) for out, _ in outs]
        parts = [Part(source, folder, counter) for folder in folders]
        fill(parts)
        infos = []
        for part, (out, made_from) in zip(parts, outs, strict=True):
            if part.writer.documents == 0:
                why = ", ".join(f"{reason}: {number:,}" for reason, number in part.left_out.items()) or "there is none"
                raise UserError(f"no document would be left ({why}); nothing was written", out)
            infos.append(part.finish())
            write_info(part.folder, infos[-1], made_from)
            sync_tree(part.folder)  # all of them before the first one gets its name
        for folder, (out, _) in zip(folders, outs, strict=True):
            publish(folder, out)
    seconds = time.perf_counter() - began
    return [Made(out, info, seconds) for (out, _), info in zip(outs, infos, strict=True)]


def write_info(folder: Path, info: StoreInfo, made_from: dict[str, Any]) -> None:
    """Write `store.json`."""
    write_stored(folder, {**info.model_dump(), "made_from": made_from})


def up_to_date(out: Path, made_from: dict[str, Any], overwrite: bool, *, reusable: bool = True) -> StoreInfo | None:
    """The store at `out` if it was made from just that; None if there is none, or it is to be replaced.

    Raises:
        UserError: something else is there.
    """
    if overwrite or not os.path.lexists(out):
        return None
    if reusable and (out / "store.json").exists():
        stored = read_json(out / "store.json")
        if isinstance(stored, dict) and stored.get("made_from") == made_from:
            return StoreInfo.model_validate(stored)
    raise exists_already(out, STORE, " and is not this store")

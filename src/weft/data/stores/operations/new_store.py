"""Creates stores from the documents of another store, atomically, and records their provenance."""

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
from weft.data.stores.store_json import write_store_json
from weft.errors import UserError
from weft.files import hidden_folder, read_json, report_write_errors, sync_tree
from weft.observe.console import Console


@dataclass(frozen=True)
class Output:
    """Settings of a new store.

    Attributes:
        path: the store's folder.
        tokenizer: tokenizer for counting the bytes of text. Without a tokenizer, the bytes are known only if all
            documents are kept.
        overwrite: whether to replace an existing store. Other files and folders are never replaced.
    """

    path: Path
    tokenizer: str | Path | None = None
    overwrite: bool = False
    console: Console = field(default_factory=lambda: Console(prints=False))


@dataclass(frozen=True)
class WrittenStore:
    """The store that an operation created. `seconds` is the operation's duration; None if the store existed already."""

    path: Path
    info: StoreInfo
    seconds: float | None


def provenance(store: TokenStore, operation: str, **arguments: Any) -> dict[str, Any]:
    """Returns `made_from`, a value in `store.json`: the operation, its arguments, and digests of the input store."""
    info = store.info
    digests = {"bin_sha256": info.bin_sha256, "idx_sha256": info.idx_sha256, "mask_sha256": info.mask_sha256}
    digests |= {"fields": info.fields} if info.fields else {}
    return {"operation": operation, "input": digests, **arguments}


class StoreWriter:
    """Writes a store that contains some documents of the store `source`.

    Attributes:
        folder: temporary folder of the new store's files; an operation can add files.
        left_out: number of documents of `source` that are not in the new store, by reason.
    """

    def __init__(self, source: TokenStore, folder: Path, counter: TextBytes | None):
        self.source, self.folder, self.counter = source, folder, counter
        self.writer = IndexedWriter(
            folder / "tokens", source.info.dtype, mask=source.loss_mask is not None, fields=source.fields
        )
        self.left_out: Counter[str] = Counter()
        self.bytes = 0

    def add(self, block: Block) -> None:
        """Appends all documents of a block."""
        self.writer.add(block.tokens, block.lengths, block.mask, block.fields)
        if self.counter is not None:
            self.bytes += self.counter.count(block.tokens, block.lengths)

    def add_selected(self, block: Block, keep: np.ndarray, reason: str) -> None:
        """Appends the documents for which `keep` (bool `[documents]`) is true; counts the others under `reason`."""
        if keep.any():
            self.add(block.select(keep))
        if left := int(np.count_nonzero(~keep)):
            self.left_out[reason] += left

    def finish(self) -> StoreInfo:
        """Writes `tokens.idx`. Returns the content of `store.json`, which the caller writes."""
        writer, old = self.writer, self.source.info
        assert writer.documents + self.left_out.total() == old.documents, (
            "internal error: the numbers of written and removed documents do not add up"
        )
        all_kept = writer.documents == old.documents
        source = SourceFile(
            path=str(self.source.path),
            size=old.tokens * self.source.tokens.dtype.itemsize,
            sha256=old.bin_sha256,
            documents=writer.documents,
        )
        return StoreInfo(
            kind=old.kind,
            chat_template=old.chat_template,
            tokenizer_digest=old.tokenizer_digest,
            vocab_size=old.vocab_size,
            eod_id=old.eod_id,
            bytes=self.bytes if self.counter is not None else old.bytes if all_kept else None,
            empty_documents=writer.empty,
            rejected=dict(self.left_out),
            sources=[source],
            **writer.finish(),
        )


def make_store(
    source: TokenStore,
    output: Output,
    made_from: dict[str, Any],
    fill: Callable[[StoreWriter], None],
    *,
    reusable: bool = True,
) -> WrittenStore:
    """Creates one store at `output.path` from the store `source` (see `make_stores`).

    Args:
        made_from: the new store's `provenance`.
        fill: function that adds documents to the writer.
        reusable: whether an existing store with the same provenance is up to date.
    """
    outs = [(output.path, made_from)]
    return make_stores(source, output, outs, lambda writers: fill(writers[0]), reusable=reusable)[0]


def make_stores(
    source: TokenStore,
    output: Output,
    outs: Sequence[tuple[Path, dict[str, Any]]],
    fill: Callable[[list[StoreWriter]], None],
    *,
    reusable: bool = True,
) -> list[WrittenStore]:
    """Creates stores from the store `source`.

    The stores are written to hidden folders, which are renamed when all stores are complete. So if `fill` or writing
    fails, no store appears.

    Args:
        output: settings; `output.path` is not used.
        outs: folder and `provenance` of each store. If all these stores exist already, nothing is done.
        fill: function that adds documents to the writers; there is one writer for each of `outs`.
        reusable: whether an existing store with the same provenance is up to date.

    Raises:
        UserError: an output path exists and must not be replaced, a store would be empty, or the disk is full.
    """
    tokenizer, overwrite = output.tokenizer, output.overwrite
    for number, (out, _) in enumerate(outs):
        check_out(out, STORE, [source.path], overwrite=overwrite)
        check_apart(out, [other for other, _ in outs[:number]], "other --out")
    existing = [existing_store(out, made_from, overwrite, reusable=reusable) for out, made_from in outs]
    # With a tokenizer, a store whose bytes were not counted is created again.
    if all(info is not None and (tokenizer is None or info.bytes is not None) for info in existing):
        return [
            WrittenStore(out, info, None) for (out, _), info in zip(outs, existing, strict=True) if info is not None
        ]
    began = time.perf_counter()
    info = source.info
    counter = None if tokenizer is None else TextBytes(tokenizer, info.tokenizer_digest, info.vocab_size)
    with ExitStack() as stack, report_write_errors(outs[-1][0]):
        folders = [stack.enter_context(hidden_folder(out)) for out, _ in outs]
        writers = [StoreWriter(source, folder, counter) for folder in folders]
        fill(writers)
        infos = []
        for writer, (out, made_from) in zip(writers, outs, strict=True):
            if writer.writer.documents == 0:
                reasons = ", ".join(f"{reason}: {number:,}" for reason, number in writer.left_out.items())
                raise UserError(
                    f"no document is left ({reasons or 'the input is empty'}); nothing was written; change the options",
                    out,
                )
            infos.append(writer.finish())
            write_store_json(writer.folder, {**infos[-1].model_dump(), "made_from": made_from})
            sync_tree(writer.folder)  # all of them before the first rename
        for folder, (out, _) in zip(folders, outs, strict=True):
            publish(folder, out)
    seconds = time.perf_counter() - began
    return [WrittenStore(out, info, seconds) for (out, _), info in zip(outs, infos, strict=True)]


def existing_store(out: Path, made_from: dict[str, Any], overwrite: bool, *, reusable: bool = True) -> StoreInfo | None:
    """Returns the StoreInfo of an existing store at `out` that is up to date; None if the store must be written.

    Args:
        made_from: provenance of the store to write.
        overwrite: whether to write the store even if `out` exists.
        reusable: whether an existing store with the provenance `made_from` is up to date.

    Raises:
        UserError: `out` exists and is not up to date, and `overwrite` is false.
    """
    if overwrite or not os.path.lexists(out):
        return None
    if reusable and (out / "store.json").exists():
        stored = read_json(out / "store.json")
        if isinstance(stored, dict) and stored.get("made_from") == made_from:
            return StoreInfo.model_validate(stored)
    raise exists_already(out, STORE, " and is another store")

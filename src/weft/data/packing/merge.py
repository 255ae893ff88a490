"""Stores put end to end, streamed: the shards of one pack, or any that were packed alike."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from weft.data.output_folder import STORE, check_out, exists_already, publish
from weft.data.stores.indexed import BLOCK_TOKENS, IndexedWriter, document_blocks, release_pages
from weft.data.stores.store import SourceFile, StoreInfo, TokenStore
from weft.data.stores.store_json import write_store_json
from weft.errors import UserError
from weft.files import hidden_folder, read_json, unwritable
from weft.observe.console import Console

ALIKE = {
    "tokenizer_digest": "another tokenizer",
    "kind": "another kind of documents",
    "vocab_size": "another vocabulary size",
    "eod_id": "another end-of-document token",
    "dtype": "another token type",
}


def merge(
    inputs: Sequence[str | Path], out: str | Path, *, overwrite: bool = False, console: Console | None = None
) -> StoreInfo:
    """Concatenate stores, in the order given. The shards 1/n to n/n of a pack give the bytes of the whole pack.

    Raises:
        UserError: no store, one that is damaged or of another tokenizer, kind or vocabulary; something at `out`.
    """
    console, out = console or Console(speaks=False), Path(out)
    stores = [TokenStore(path) for path in inputs]
    if not stores:
        raise UserError("no stores to merge; name some")
    for store in stores[1:]:
        _check_alike(stores[0], store)
    check_out(out, STORE, [store.path for store in stores], overwrite=overwrite)
    if os.path.lexists(out) and not overwrite:
        raise exists_already(out, STORE)
    for line in shard_warnings(stores):
        console.warning(line)
    with unwritable(out), hidden_folder(out) as folder:
        info = _write(stores, folder, console)
        publish(folder, out)
    return info


def _check_alike(first: TokenStore, other: TokenStore) -> None:
    for name, what in ALIKE.items():
        a, b = getattr(first.info, name), getattr(other.info, name)
        if a != b:
            shown = f"{str(a)[:16]} and {str(b)[:16]}"
            raise UserError(f"{what} than {first.path} has ({shown}); stores must be packed alike", other.path)
    if (first.loss_mask is None) != (other.loss_mask is None):
        raise UserError(f"of this and {first.path} one has a loss mask, the other not", other.path)


def _write(stores: Sequence[TokenStore], folder: Path, console: Console) -> StoreInfo:
    first = stores[0]
    writer = IndexedWriter(folder / "tokens", first.info.dtype, mask=first.loss_mask is not None)
    total = sum(store.num_tokens for store in stores) * first.tokens.dtype.itemsize
    with console.progress(total, "merging", unit="B") as bar:
        for store in stores:
            digests = [hashlib.sha256(), hashlib.sha256()]
            for start, stop, begin, end in document_blocks(store.lengths):
                for low in range(begin, end, BLOCK_TOKENS):  # a document may be longer than a block
                    digests[0].update(store.tokens[low : min(low + BLOCK_TOKENS, end)].data)
                    if store.loss_mask is not None:
                        digests[1].update(store.loss_mask[low : min(low + BLOCK_TOKENS, end)].data)
                mask = None if store.loss_mask is None else store.loss_mask[begin:end]
                writer.add(store.tokens[begin:end], store.lengths[start:stop], mask)
                release_pages(store.tokens, store.loss_mask)
                bar.update(writer.tokens * first.tokens.dtype.itemsize)
            for digest, name, told in zip(
                digests, ("tokens.bin", "loss_mask.bin"), (store.info.bin_sha256, store.info.mask_sha256), strict=True
            ):
                if told is not None and digest.hexdigest() != told:
                    raise UserError(
                        "its bytes are not those that were packed; it is damaged: pack the store again",
                        store.path / name,
                    )
    idx_sha256 = writer.finish()
    infos = [store.info for store in stores]
    sources = join_sources(source for info in infos for source in info.sources)
    _write_rejects(stores, folder)
    info = StoreInfo(
        **{name: getattr(first.info, name) for name in ALIKE},
        documents=writer.documents,
        tokens=writer.tokens,
        bytes=None if any(info.bytes is None for info in infos) else sum(info.bytes or 0 for info in infos),
        empty_documents=sum(info.empty_documents for info in infos),
        blank_lines=sum(info.blank_lines for info in infos),
        rejected=_summed(info.rejected for info in infos),
        skipped_files=_summed(info.skipped_files for info in infos),
        notes=_summed(info.notes for info in infos),
        bin_sha256=writer.digest.hexdigest(),
        idx_sha256=idx_sha256,
        mask_sha256=None if first.loss_mask is None else writer.mask_digest.hexdigest(),
        sources=sources,
    )
    if not (info.documents == sum(i.documents for i in infos) and info.tokens == sum(i.tokens for i in infos)):
        raise UserError("the stores' counts do not add up; `weft data verify` tells which one is damaged", folder)
    stored: dict[str, Any] = info.model_dump()
    stored["sources"] = [source.model_dump(exclude_none=True) for source in sources]
    write_store_json(folder, stored)
    return info


def _summed(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def _write_rejects(stores: Sequence[TokenStore], folder: Path) -> None:
    files = [store.path / "rejects.jsonl" for store in stores if (store.path / "rejects.jsonl").exists()]
    if files:
        with open(folder / "rejects.jsonl", "wb") as out:
            for file in files:
                with open(file, "rb") as part:
                    shutil.copyfileobj(part, out, 1 << 20)


def join_sources(sources: Iterable[SourceFile]) -> list[SourceFile]:
    """The sources of stores, one after the other; what two shards have of one file becomes one source."""
    joined: list[SourceFile] = []
    for source in sources:
        last = joined[-1] if joined else None
        if (
            last is None
            or last.path != source.path
            or not (last.cut and last.cut.after and source.cut and source.cut.before)
        ):
            joined.append(source)
            continue
        digests = [*last.cut.digests, *source.cut.digests]
        cut = last.cut.model_copy(update={"after": source.cut.after, "digests": digests})
        joined[-1] = SourceFile(
            path=source.path,
            size=last.size + source.size,
            sha256=hashlib.sha256("".join(digests).encode()).hexdigest(),
            documents=last.documents + source.documents,
            rejected=last.rejected + source.rejected,
            skipped=last.skipped or source.skipped,
            cut=cut if cut.before or cut.after else None,
        )
    return joined


def shard_warnings(stores: Sequence[TokenStore]) -> list[str]:
    """What is odd about the shares that stores say they are: some missing, twice there, or in another order."""
    made = [read_json(store.path / "store.json").get("made_from") or {} for store in stores]
    shards = [entry["shard"] for entry in made if entry.get("shard")]
    if len(shards) < len(made) or len({(entry["shard"][1], entry.get("files")) for entry in made}) != 1:
        return []
    numbers, total = [shard[0] for shard in shards], shards[0][1]
    missing = sorted(set(range(1, total + 1)) - set(numbers))
    lines = []
    if missing:
        lines.append(f"of {total} shards {', '.join(map(str, missing))} are missing: the merged store is not the whole")
    if len(set(numbers)) < len(numbers):
        lines.append("a shard is named more than once: its documents are in the merged store as often")
    if numbers != sorted(numbers):
        lines.append(
            "the shards are not in the order 1, 2, ...: the merged store has the order in which they are named"
        )
    return lines

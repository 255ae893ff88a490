"""Concatenates token stores in constant memory: the shards of a pack, or stores of the same tokenizer and kind."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.output_folder import STORE, check_out, publish
from weft.data.stores.field_files import field_file
from weft.data.stores.indexed import BLOCK_TOKENS, IndexedWriter, document_blocks, release_pages
from weft.data.stores.store import SourceFile, StoreInfo, TokenStore
from weft.data.stores.store_json import write_store_json
from weft.errors import UserError
from weft.files import hidden_folder, read_json, report_write_errors
from weft.observe.console import Console

MUST_MATCH = {  # field of StoreInfo -> what a store with a different value has
    "tokenizer_digest": "another tokenizer",
    "kind": "another kind of documents",
    "vocab_size": "another vocabulary size",
    "eod_id": "another end-of-document token",
    "dtype": "another dtype of token ids",
}


def merge(
    inputs: Sequence[str | Path], out: str | Path, *, overwrite: bool = False, console: Console | None = None
) -> StoreInfo:
    """Concatenates stores in the given order. Merging all shards of a pack gives the bytes of a pack without shards.

    Raises:
        UserError: no store is given, a store is damaged, stores differ in a field of MUST_MATCH, only some have a
            loss mask, or `out` exists and must not be replaced.
    """
    console, out = console or Console(prints=False), Path(out)
    stores = [TokenStore(path) for path in inputs]
    if not stores:
        raise UserError("no stores to merge; name at least one store")
    for store in stores[1:]:
        _check_match(stores[0], store)
    check_out(out, STORE, [store.path for store in stores], overwrite=overwrite, new=True)
    for line in shard_warnings(stores):
        console.warning(line)
    with report_write_errors(out), hidden_folder(out) as folder:
        info = _write(stores, folder, console)
        publish(folder, out)
    return info


def _check_match(first: TokenStore, other: TokenStore) -> None:
    for name, what in MUST_MATCH.items():
        a, b = getattr(first.info, name), getattr(other.info, name)
        if a != b:
            shown = f"{str(a)[:16]} there, {str(b)[:16]} here"
            what = f"has {what} than {first.path} ({shown}); merge only stores of the same tokenizer and kind"
            raise UserError(what, other.path)
    if (first.loss_mask is None) != (other.loss_mask is None):
        which, without = ("lacks", "has") if other.loss_mask is None else ("has", "lacks")
        raise UserError(
            f"{which} a loss mask, but {first.path} {without} one; merge only stores of the same kind", other.path
        )
    if different := sorted(first.fields.keys() ^ other.fields.keys()):
        which, without = ("has", "lacks") if different[0] in other.fields else ("lacks", "has")
        what = f"{which} the field {different[0]!r} of documents, but {first.path} {without} it"
        raise UserError(f"{what}; merge only stores of the same fields", other.path)


def _write(stores: Sequence[TokenStore], folder: Path, console: Console) -> StoreInfo:
    first = stores[0]
    writer = IndexedWriter(folder / "tokens", first.info.dtype, mask=first.loss_mask is not None, fields=first.fields)
    total = sum(store.num_tokens for store in stores) * first.tokens.dtype.itemsize
    with console.progress(total, "merging", unit="B") as bar:
        for store in stores:
            digests, names = [hashlib.sha256(), hashlib.sha256()], list(store.fields)
            digests += [hashlib.sha256(np.ascontiguousarray(store.fields[name]).data) for name in names]
            for start, stop, begin, end in document_blocks(store.lengths):
                for low in range(begin, end, BLOCK_TOKENS):  # a document may be longer than a block
                    high = min(low + BLOCK_TOKENS, end)
                    digests[0].update(store.tokens[low:high].data)
                    if store.loss_mask is not None:
                        digests[1].update(store.loss_mask[low:high].data)
                mask = None if store.loss_mask is None else store.loss_mask[begin:end]
                fields = {name: values[start:stop] for name, values in store.fields.items()}
                writer.add(store.tokens[begin:end], store.lengths[start:stop], mask, fields)
                release_pages(store.tokens, store.loss_mask)
                bar.update(writer.tokens * first.tokens.dtype.itemsize)
            expected = {"tokens.bin": store.info.bin_sha256, "loss_mask.bin": store.info.mask_sha256}
            expected |= {field_file(name): store.info.fields[name] for name in names}
            for digest, (name, sha256) in zip(digests, expected.items(), strict=True):
                if sha256 is not None and digest.hexdigest() != sha256:
                    raise UserError(
                        "damaged: the file's digest differs from store.json; pack the store again", store.path / name
                    )
    written = writer.finish()
    infos = [store.info for store in stores]
    sources = join_sources(source for info in infos for source in info.sources)
    _write_rejects(stores, folder)
    info = StoreInfo(
        **{name: getattr(first.info, name) for name in MUST_MATCH} | written,
        chat_template=infos[0].chat_template if len({info.chat_template for info in infos}) == 1 else None,
        bytes=None if any(info.bytes is None for info in infos) else sum(info.bytes or 0 for info in infos),
        empty_documents=sum(info.empty_documents for info in infos),
        blank_lines=sum(info.blank_lines for info in infos),
        rejected=_sum_counts(info.rejected for info in infos),
        skipped_files=_sum_counts(info.skipped_files for info in infos),
        notes=_sum_counts(info.notes for info in infos),
        sources=sources,
    )
    if not (info.documents == sum(i.documents for i in infos) and info.tokens == sum(i.tokens for i in infos)):
        raise UserError("the stores' counts do not add up; find the damaged store with `weft data verify`", folder)
    stored: dict[str, Any] = info.model_dump()
    stored["sources"] = [source.model_dump(exclude_none=True) for source in sources]
    write_store_json(folder, stored)
    return info


def _sum_counts(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for entry in counts:
        total.update(entry)
    return dict(total)


def _write_rejects(stores: Sequence[TokenStore], folder: Path) -> None:
    for store in stores:
        if (file := store.path / "rejects.jsonl").exists():
            with open(file, "rb") as rejects, open(folder / "rejects.jsonl", "ab") as out:
                shutil.copyfileobj(rejects, out, 1 << 20)


def join_sources(sources: Iterable[SourceFile]) -> list[SourceFile]:
    """Joins adjacent entries of one input file that was split between shards. Returns other entries unchanged."""
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
    """Returns warnings, if shards of a pack are missing, are repeated or are not in ascending order."""
    made = [read_json(store.path / "store.json").get("made_from") or {} for store in stores]
    shards = [entry["shard"] for entry in made if entry.get("shard")]
    if len(shards) < len(made) or len({(entry["shard"][1], entry.get("files")) for entry in made}) != 1:
        return []
    numbers, total = [shard[0] for shard in shards], shards[0][1]
    missing = sorted(set(range(1, total + 1)) - set(numbers))
    lines = []
    if missing:
        named = ", ".join(map(str, missing))
        lines.append(f"missing shards: {named} of {total}; the merged store is incomplete")
    if len(set(numbers)) < len(numbers):
        lines.append("a shard is named more than once: the merged store repeats its documents")
    if numbers != sorted(numbers):
        lines.append("the shards are not in the order 1, 2, ...: the merged store has the order of the arguments")
    return lines

"""Documents to a token store, streamed with bounded memory, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.config.errors import UserError
from weft.config.headers import read_json
from weft.data.documents import Counts, Reject
from weft.data.indexed import IndexedWriter, token_dtype
from weft.data.sources import Reading, find_files, read_all
from weft.data.store import StoreInfo
from weft.data.tokenizer import Tokenizer
from weft.observe.console import Console

BATCH_CHARACTERS = 8_000_000  # tokenized at once: enough for all threads, little enough for any memory


@dataclass(frozen=True)
class Packed:
    """What `pack` did. `seconds` is None if the store was up to date already."""

    info: StoreInfo
    seconds: float | None


def pack(
    inputs: Sequence[str | Path],
    out: Path,
    tokenizer: Tokenizer,
    *,
    files_from: str | Path | None = None,
    text_field: str = "text",
    skip_rejects: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> Packed:
    """Tokenize all documents of `inputs` into the token store `out`; one end-of-document token closes each.

    Args:
        skip_rejects: note what is no document in `rejects.jsonl` and go on; otherwise the first one is an error.
        overwrite: replace a store that is there.

    Raises:
        UserError: no input, a document that cannot be read, another store at `out`, a full disk.
    """
    console = console or Console(speaks=False)
    files = find_files(inputs, files_from)
    wanted = {
        "tokenizer_digest": tokenizer.digest,
        "field": text_field,
        "inputs": [[str(path), path.stat().st_size] for path in files],
    }
    if out.exists() and not overwrite:
        if (out / "store.json").exists() and (stored := read_json(out / "store.json")).get("made_from") == wanted:
            return Packed(StoreInfo.model_validate(stored), None)
        raise UserError("exists already and is not this store; name another --out, or --overwrite replaces it", out)
    began = time.perf_counter()
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed run left
    try:
        partial.mkdir(parents=True)
        info = _write(files, partial, tokenizer, text_field, skip_rejects, console)
        (partial / "store.json").write_text(
            json.dumps({**info.model_dump(), "made_from": wanted}, indent=1) + "\n", encoding="utf-8"
        )
        _sync(partial)
        if out.exists():
            old = out.with_name(f".{out.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            out.rename(old)
            partial.rename(out)
            shutil.rmtree(old)
        else:
            partial.rename(out)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"cannot be written: {error.strerror}; nothing was left there", out) from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Packed(info, time.perf_counter() - began)


def _write(
    files: list[Path], folder: Path, tokenizer: Tokenizer, text_field: str, skip_rejects: bool, console: Console
) -> StoreInfo:
    counts, dtype = Counts(), token_dtype(tokenizer.vocab_size)
    writer = IndexedWriter(folder / "tokens", dtype)
    tokens = 0

    def on_reject(path: Path, reject: Reject) -> None:
        if not skip_rejects:
            what = f"{reject.reason}; mend it, or --on-error skip leaves such documents out"
            raise UserError(what, path, reject.line)
        with open(folder / "rejects.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"path": str(path), "line": reject.line, "reason": reject.reason}) + "\n")

    with console.progress(sum(path.stat().st_size for path in files), "packing", unit="B") as bar:
        batch: list[str] = []
        characters = 0

        def flush() -> None:
            nonlocal tokens, characters
            ids, lengths = close_documents(*tokenizer.encode_batch(batch), tokenizer.eod_id)
            writer.add(ids, lengths)
            tokens += len(ids)
            batch.clear()
            characters = 0

        def on_progress(done: int) -> None:
            bar.update(done, tokens=tokens)

        reading, sources = Reading(field=text_field), []
        for text in read_all(
            files, reading, counts, on_reject=on_reject, on_progress=on_progress, on_file=sources.append
        ):
            batch.append(text.value)  # type: ignore[arg-type]
            characters += len(text.value)
            if characters >= BATCH_CHARACTERS:
                flush()
        if batch:
            flush()
    if counts.documents == 0:
        raise UserError(f"no document in {len(files):,} files ({_reasons(counts)}); name files of text or JSON lines")
    idx_digest = writer.finish()
    return StoreInfo(
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        dtype=str(dtype),
        documents=counts.documents,
        tokens=tokens,
        bytes=counts.bytes,
        empty_documents=counts.empty,
        blank_lines=counts.blank_lines,
        rejected=dict(counts.rejected),
        skipped_files=dict(counts.skipped_files),
        bin_sha256=writer.digest.hexdigest(),
        idx_sha256=idx_digest,
        sources=sources,  # type: ignore[arg-type]
    )


def _reasons(counts: Counts) -> str:
    reasons = {**counts.rejected, **{f"{k} files": v for k, v in counts.skipped_files.items()}}
    return ", ".join(f"{reason}: {number:,}" for reason, number in reasons.items()) or "all blank"


def close_documents(ids: np.ndarray, lengths: np.ndarray, eod_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Put one end-of-document token behind each document of a ragged batch."""
    closed = lengths + 1
    out = np.full(len(ids) + len(lengths), eod_id, dtype=np.int64)
    text = np.ones(len(out), bool)
    text[np.cumsum(closed) - 1] = False
    out[text] = ids
    return out, closed


def _sync(folder: Path) -> None:
    """To the disk before the rename: the name stands for whole files."""
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

"""Defines the request of a pack: everything that determines the store.

Also locks the hidden folder, which keeps the work of an unfinished pack with the same request.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft.data.documents import Counts
from weft.data.output_folder import STORE, exists_already
from weft.data.packing.encoder import Encoder
from weft.data.sources import Files, Reading
from weft.data.sources.find import format_counts
from weft.data.sources.source_format import contents_by_format
from weft.errors import UserError
from weft.files import lock_exclusively, read_json, replace_file
from weft.formatting import counted

LABELS = {  # key of the request -> options that set it
    "encoder": "the options of encoding (--tokenizer, --exact, ...)",
    "reading": "the options of reading (--field, ...)",
    "shard": "--shard",
}


def make_request(
    encoder: Encoder, reading: Reading, shard: tuple[int, int] | None, range_bytes: int, files: Sequence[Path]
) -> dict[str, Any]:
    """Returns everything that determines the store, as JSON values. `pack` stores it as `made_from` in `store.json`."""
    facts = [[str(path), os.path.getsize(path) if os.path.isfile(path) else 0] for path in files]
    request = {
        "encoder": encoder.identity(),
        "reading": asdict(reading),
        "shard": shard,
        "range_bytes": range_bytes,
        "files": hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
    }
    return json.loads(json.dumps(request))


def read_existing(out: Path, request: dict[str, Any], files: Sequence[Path]) -> dict[str, Any]:
    """Returns the content of the existing `store.json` at `out`.

    Raises:
        UserError: the store was made from a different request, or an input file is newer than the store.
    """
    what = " and was made from other inputs or options"
    if (out / "store.json").exists():
        stored, written = read_json(out / "store.json"), (out / "store.json").stat().st_mtime_ns
        if isinstance(stored, dict) and stored.get("made_from") == request:
            newer = next((path for path in files if os.path.isfile(path) and path.stat().st_mtime_ns > written), None)
            if newer is None:
                return stored
            what = f" and is older than {newer}"
    raise exists_already(out, STORE, what)


def check_rejected(out: Path, rejected: Mapping[str, int], encoder: Encoder, *, fail: bool) -> None:
    """Raises UserError if `fail` is set and the earlier pack that wrote the store at `out` rejected documents.

    Documents that were rejected for a reason in `encoder.drops` are allowed.

    Args:
        rejected: reason -> number of documents that the earlier pack rejected.
        fail: whether the current pack must fail at a rejected document.
    """
    for reason, number in rejected.items():
        if fail and reason not in encoder.drops:
            what = f"an earlier pack with --on-error skip rejected {counted(number, 'document')} ({reason})"
            raise UserError(f"{what}; use --on-error skip again, or correct the input and use --overwrite", out)


def no_document(counts: Counts, files: Files, reading: Reading, encoder: Encoder) -> UserError:
    """Returns the error for files from which no document with text was packed, with the reasons in `counts`."""
    skipped = counts.skipped_files + files.skipped
    if len(counts.rejected) == 1 and not skipped:
        ((reason, number),) = counts.rejected.items()
        if reason in encoder.drops and reason.startswith("longer"):
            noun = encoder.kind.removesuffix("s")
            are = f"all {counted(number, noun)} are" if number > 1 else f"the only {noun} is"
            words = encoder.words
            limit, truncate = words.name("max_tokens"), words.setting("overlong", "truncate")
            return UserError(f"{are} {reason}; raise {limit}, or set {truncate}")
    reasons = [f"{reason}: {number:,}" for reason, number in counts.rejected.items()]
    if skipped:
        reasons.append(f"skipped {format_counts(skipped)}")
    if counts.empty:
        reasons.append(counted(counts.empty, "empty document"))
    held = set(contents_by_format(files, reading).values())
    if reading.records:
        wanted = "records of conversations"
    else:
        wanted = "text" if held == {"text"} else f"{'rows' if held <= {'rows'} else 'records'} with text"
    why = ", ".join(reasons) or "all blank"
    what = f"no {'text' if counts.empty else 'document'} in {counted(len(files), 'file')}"
    return UserError(f"{what} ({why}); name files that contain {wanted}")


def lock_folder(folder: Path, out: Path, request: dict[str, Any], *, overwrite: bool, keep: bool) -> int:
    """Locks the hidden folder of an unfinished pack, and deletes work in it that the current pack cannot resume.

    The files of finished parts are kept even if input files have changed since; the caller checks this for each part.

    Args:
        folder: the hidden folder.
        out: folder of the store, for messages.
        overwrite: whether to delete the work of a pack with a different request.
        keep: whether to keep the work of an earlier pack with the same request; if False, the pack starts over.

    Returns:
        The lock: a file descriptor, which the caller closes when the work is done.

    Raises:
        UserError: another process uses the folder, or the folder contains work of a different request and `overwrite`
            is false.
        OSError: the folder is not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        lock_exclusively(
            lock, "another process is packing this store; wait until it ends, or choose another --out", out
        )
        new, file = {key: value for key, value in request.items() if key != "files"}, folder / "request.json"
        try:
            old = json.loads(file.read_bytes())
        except (FileNotFoundError, ValueError):
            old = None
        if old is not None and old != new and not overwrite:
            other = " and ".join(LABELS.get(key, key) for key in new if old.get(key) != new[key])
            what = f"contains an unfinished pack that differs in {other}"
            raise UserError(
                f"{what}; repeat the earlier command to resume it, or use --overwrite to start over", folder
            )
        if old != new or not keep:
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "lock":
                    path.unlink()
            replace_file(file, json.dumps(new, indent=1), durable=False)
        (folder / "parts").mkdir(exist_ok=True)
        (folder / "store").mkdir(exist_ok=True)
    except BaseException:
        os.close(lock)
        raise
    return lock

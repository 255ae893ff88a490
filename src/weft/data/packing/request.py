"""What a store is made by, and the hidden folder that keeps an unfinished pack's work for the same request."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft.data.output_folder import STORE, exists_already
from weft.data.packing.encoder import Encoder
from weft.data.sources import Reading
from weft.errors import UserError
from weft.files import read_json, replace_file


def request_of(
    encoder: Encoder, reading: Reading, shard: tuple[int, int] | None, range_bytes: int, files: Sequence[Path]
) -> dict[str, Any]:
    """What a store is made by, as JSON: `made_from` in its `store.json`."""
    facts = [[str(path), os.path.getsize(path) if os.path.isfile(path) else 0] for path in files]
    request = {
        "encoder": encoder.identity(),
        "reading": asdict(reading),
        "shard": shard,
        "range_bytes": range_bytes,
        "files": hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
    }
    return json.loads(json.dumps(request))


def up_to_date(out: Path, request: dict[str, Any], files: Sequence[Path]) -> dict[str, Any]:
    """What the store at `out` says, if it is what would be made.

    Raises:
        UserError: it is something else, or one of the files has changed since.
    """
    what = " and is not this store"
    if (out / "store.json").exists():
        stored, written = read_json(out / "store.json"), (out / "store.json").stat().st_mtime_ns
        if isinstance(stored, dict) and stored.get("made_from") == request:
            newer = next((path for path in files if os.path.isfile(path) and path.stat().st_mtime_ns > written), None)
            if newer is None:
                return stored
            what = f" and is older than {newer}"
    raise exists_already(out, STORE, what)


def claim(folder: Path, out: Path, request: dict[str, Any], *, overwrite: bool, keep: bool) -> int:
    """Make the hidden folder one process's own, and see that what is in it was asked for in the same way.

    Files may have changed since: parts know what they were made of.

    Args:
        overwrite: start over if it was not.
        keep: go on with what is there, if it was; without it, start over always.

    Returns:
        The lock: a file descriptor, to be closed when the work is done.

    Raises:
        UserError: another process is at work there, or left something else.
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(lock, out)
        asked, file = {key: value for key, value in request.items() if key != "files"}, folder / "request.json"
        left = _left(file)
        if left is not None and left != asked and not overwrite:
            other = " and ".join(_words(key) for key in asked if left.get(key) != asked[key])
            raise UserError(
                f"an unfinished pack with other {other} is here; its own command goes on with it, --overwrite starts "
                "over",
                folder,
            )
        if left != asked or not keep:
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "lock":
                    path.unlink()
            replace_file(file, json.dumps(asked, indent=1), durable=False)
        (folder / "parts").mkdir(exist_ok=True)
        (folder / "store").mkdir(exist_ok=True)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _lock(lock: int, out: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError("another process packs it now; wait for that, or name another --out", out) from None
    except OSError:
        pass  # a network's disk without locks


def _left(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _words(key: str) -> str:
    words = {"encoder": "tokens (--tokenizer, --exact, ...)", "reading": "texts (--field, ...)", "shard": "--shard"}
    return words.get(key, key)

"""`store.json` as bytes: written by this alone, with a digest of itself, so that any change of it is seen."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

# Files beside the tokens; their digests are in `store.json`. That of the first is there always, if only as null.
BESIDE = {"rejects_sha256": "rejects.jsonl", "duplicates_sha256": "duplicates.jsonl"}


def write_stored(folder: Path, stored: dict[str, Any]) -> dict[str, Any]:
    """Write `store.json`, the last of a store's files.

    Args:
        stored: what it says, without the digests of `rejects.jsonl`, `duplicates.jsonl` and itself.

    Returns:
        What it says, with them.
    """
    stored = {key: value for key, value in stored.items() if key not in BESIDE and key != "digest"}
    for key, name in BESIDE.items():
        digest = file_digest(folder / name)
        if digest is not None or key == "rejects_sha256":
            stored[key] = digest
    stored["digest"] = own_digest(stored)
    (folder / "store.json").write_bytes(as_bytes(stored))
    return stored


def as_bytes(stored: dict[str, Any]) -> bytes:
    """The bytes of a `store.json` that says this."""
    return (json.dumps(stored, indent=1) + "\n").encode()


def own_digest(stored: dict[str, Any]) -> str:
    """sha256 of all keys but `digest`, as JSON with sorted keys and without blanks."""
    rest = {key: value for key, value in stored.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_digest(path: Path) -> str | None:
    """sha256 of a file; None if there is none."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

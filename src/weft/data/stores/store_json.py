"""Writes `store.json` with a digest of its own content, so that any change to it is detected."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

# Key of store.json -> the file of which it is the digest. The first key is always present, null without the file.
FILE_DIGESTS = {"rejects_sha256": "rejects.jsonl", "duplicates_sha256": "duplicates.jsonl"}


def write_store_json(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Writes `store.json`, the last of a store's files.

    Args:
        content: without the digests of `rejects.jsonl`, `duplicates.jsonl` and the content itself.

    Returns:
        The content with these digests.
    """
    content = {key: value for key, value in content.items() if key not in FILE_DIGESTS and key != "digest"}
    for key, name in FILE_DIGESTS.items():
        digest = file_digest(folder / name)
        if digest is not None or key == "rejects_sha256":
            content[key] = digest
    content["digest"] = content_digest(content)
    (folder / "store.json").write_bytes(to_bytes(content))
    return content


def to_bytes(content: dict[str, Any]) -> bytes:
    """Returns the bytes of a `store.json` with this content."""
    return (json.dumps(content, indent=1) + "\n").encode()


def content_digest(content: dict[str, Any]) -> str:
    """Returns the sha256 of all keys except `digest`, as JSON with sorted keys and without spaces."""
    rest = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_digest(path: Path) -> str | None:
    """Returns the sha256 of a file, or None if there is no such file."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

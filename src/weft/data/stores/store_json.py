"""Writes `store.json`, with a digest of its content so that any change of the file is detected."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

# Key of store.json -> name of the file whose digest it is. The first key is always present; null if there is no file.
SAMPLED = ("tokens.bin", "tokens.idx", "loss_mask.bin")
SAMPLES, SAMPLE_BYTES = 64, 65536  # blocks of a file, whose digest is compared before each run
FILE_DIGESTS = {"rejects_sha256": "rejects.jsonl", "duplicates_sha256": "duplicates.jsonl"}


def write_store_json(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Adds digests to `content` and writes it as `store.json`. All other files of the store must exist already.

    Args:
        content: keys and values of `store.json`, without the digests that this function adds.

    Returns:
        The content with the digests of `rejects.jsonl`, of `duplicates.jsonl` and of the content itself.
    """
    content = {key: value for key, value in content.items() if key not in FILE_DIGESTS and key != "digest"}
    for key, name in FILE_DIGESTS.items():
        digest = file_digest(folder / name)
        if digest is not None or key == "rejects_sha256":
            content[key] = digest
    content["sample_sha256"] = sample_digest(folder)
    content["digest"] = content_digest(content)
    (folder / "store.json").write_bytes(to_bytes(content))
    return content


def to_bytes(content: dict[str, Any]) -> bytes:
    """Serializes the content of a `store.json`."""
    return (json.dumps(content, indent=1) + "\n").encode()


def content_digest(content: dict[str, Any]) -> str:
    """Returns the sha256 of `content` without the key `digest`, serialized with sorted keys and without spaces."""
    rest = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_digest(path: Path) -> str | None:
    """Returns the sha256 of a file, or None if there is no such file."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sample_digest(folder: Path) -> str:
    """Returns the sha256 of the sizes of a store's files, and of blocks at equal distances in each file.

    It reads at most 4 MiB of each file, and files of that size completely.
    """
    digest = hashlib.sha256()
    for name in SAMPLED:
        path = folder / name
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{name} {size} ".encode())
        last = max(0, size - SAMPLE_BYTES)
        with open(path, "rb") as file:
            for start in sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)}):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()

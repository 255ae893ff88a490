"""The files of a checkpoint: their names, their checksums, and how they appear and go as one.

A checkpoint is a directory `step-%08d`. While it is written it is called `.step-%08d.partial`, while it is deleted
`.step-%08d.old`: a visible name always means a whole checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from weft.files import remove

FOLDER = "checkpoints"
CHECKSUMS = "checksums.json"
INDEX = "index.json"
OPTIMIZER = "optimizer.json"
MODEL = "model.json"
STATE = "state.json"
# In a folder that was imported: what Hugging Face's files say and a model section does not, for the way back.
ORIGIN = "huggingface.json"

_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(partial|old)")


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a whole checkpoint's name; None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def is_leftover(path: Path) -> bool:
    """Whether this is what a killed save or a killed deletion left."""
    return _LEFTOVER.fullmatch(path.name) is not None


def listed(folder: Path) -> list[Path]:
    """The checkpoints in a folder by their names, oldest step first."""
    if not folder.is_dir():
        return []
    found = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found)]


# ---- writing


@dataclass(frozen=True)
class Digest:
    """What a file must be: its SHA-256 in hexadecimal and its size in bytes."""

    sha256: str
    bytes: int


def write_json(path: Path, value: Any) -> Digest:
    """Write and fsync a JSON file."""
    data = (json.dumps(value, indent=None if path.name == INDEX else 2) + "\n").encode()
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Digest(hashlib.sha256(data).hexdigest(), len(data))


def write_checksums(directory: Path, digests: dict[str, Digest]) -> None:
    files = {name: {"sha256": digest.sha256, "bytes": digest.bytes} for name, digest in sorted(digests.items())}
    write_json(directory / CHECKSUMS, {"files": files, "digest": _digest_of(files)})


def _digest_of(files: dict) -> str:
    """The list's own checksum, so that damage in the list is not taken for damage in a file."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def sweep(folder: Path) -> None:
    """Delete what killed saves and deletions left."""
    for path in list(folder.iterdir()):
        if is_leftover(path):
            remove(path)


class Keep(NamedTuple):
    """Which checkpoints stay: the `last` of the highest steps, and for good those of steps divisible by `every`."""

    last: int
    every: int | None = None


def prune(folder: Path, keep: Keep, newest: Path | None = None) -> None:
    """Delete all checkpoints but those to keep and `newest`.

    Without `newest`, the last undamaged one stays in its place, by its files' sizes; nothing goes if there is none.
    """
    newest = newest or last_whole(folder, contents=False)
    found = listed(folder)
    kept = {*(found[-keep.last :] if keep.last > 0 else []), newest}
    for path in found if newest is not None else ():
        step = step_of(path)
        if path not in kept and not (keep.every and step is not None and step % keep.every == 0):
            remove(path)


# ---- checking


@dataclass(frozen=True)
class Damage:
    """What is wrong with one file of a checkpoint."""

    file: Path
    what: str


def read_checksums(directory: Path) -> dict[str, Digest] | Damage:
    path = directory / CHECKSUMS
    try:
        content = json.loads(path.read_bytes())
        files = content["files"]
        if content["digest"] != _digest_of(files):
            return Damage(path, "its contents are not what was written")
        digests = {name: Digest(entry["sha256"], entry["bytes"]) for name, entry in files.items()}
    except FileNotFoundError:
        return Damage(path, "the file is missing")
    except OSError as error:
        return Damage(path, f"it cannot be read: {error.strerror or error}")
    except (ValueError, KeyError, TypeError, AttributeError):
        return Damage(path, "it is not the JSON that was written")
    for name in digests:
        if os.path.basename(name) != name:
            return Damage(path, f"it names a file outside the checkpoint ({name})")
    return digests


# Files found whole, by what stat() says of them: one process need not hash the same bytes twice.
_whole: set[tuple] = set()


def _check(path: Path, digest: Digest, contents: bool) -> Damage | None:
    try:
        stat = path.stat()
        if stat.st_size != digest.bytes:
            return Damage(path, f"it has {stat.st_size:,} bytes of {digest.bytes:,}")
        identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, digest.sha256)
        if not contents or identity in _whole:
            return None
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return Damage(path, "the file is missing")
    except OSError as error:
        return Damage(path, f"it cannot be read: {error.strerror or error}")
    if found != digest.sha256:
        return Damage(path, "its contents are not what was written (SHA-256 differs)")
    _whole.add(identity)
    return None


def threads() -> int:
    """Threads for reading, writing and hashing: SHA-256 gets through 1 to 2 GB/s on each."""
    return max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


def find_damage(directory: Path, *, contents: bool = True, part: int = 0, parts: int = 1) -> Damage | None:
    """The first damaged file of a checkpoint; None if it is whole.

    Args:
        contents: hash the files; False looks at their presence and sizes only.
        part, parts: hash every `parts`-th file from `part` on (ranks share the work); all files' sizes are checked.
    """
    digests = read_checksums(directory)
    if isinstance(digests, Damage):
        return digests
    names = sorted(digests)
    for name in names:
        if (damage := _check(directory / name, digests[name], contents=False)) is not None:
            return damage
    return _first_damage(directory, digests, names[part::parts]) if contents else None


def _first_damage(directory: Path, digests: dict[str, Digest], names: Iterable[str]) -> Damage | None:
    with ThreadPoolExecutor(threads()) as pool:
        for damage in pool.map(lambda name: _check(directory / name, digests[name], contents=True), names):
            if damage is not None:
                pool.shutdown(cancel_futures=True)
                return damage
    return None


def last_whole(folder: Path, before: int | None = None, contents: bool = True) -> Path | None:
    """The undamaged checkpoint of the highest step (below `before`); `contents` as in `find_damage`."""
    for path in reversed(listed(folder)):
        step = step_of(path)
        if (before is None or (step is not None and step < before)) and find_damage(path, contents=contents) is None:
            return path
    return None

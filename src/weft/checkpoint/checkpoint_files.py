"""Names, checksums, listing, pruning and verification of checkpoint files.

A checkpoint is a directory `step-%08d`. The directory is named `.step-%08d.partial` while it is written and
`.step-%08d.old` while it is deleted, so a checkpoint with a visible name is always complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.checkpoint.best import read_values
from weft.config.adapter import RECORD as ADAPTER  # noqa: F401 (one of the names of files below)
from weft.errors import UserError
from weft.files import partial_path, read_json, remove
from weft.processes import usable_cores

if TYPE_CHECKING:
    from weft.config.run import CheckpointSection

FOLDER = "checkpoints"
BEST = "best"  # name of a link to the best checkpoint
CHECKSUMS = "checksums.json"
INDEX = "index.json"
OPTIMIZER = "optimizer.json"
MODEL = "model.json"
STATE = "state.json"
# In an imported folder: the content of config.json and generation_config.json, which the export writes again.
ORIGIN = "huggingface.json"
# torch's name of a dtype -> the name in a safetensors header.
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}

_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(partial|old)")


def checkpoint_name(step: int) -> str:
    """Returns the name of a step's checkpoint directory, such as "step-00000100"."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Returns the step that a checkpoint directory's name contains; None if the path is not named like a checkpoint."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def is_leftover(path: Path) -> bool:
    """Whether the path has the hidden name of a checkpoint whose save or deletion was interrupted."""
    return _LEFTOVER.fullmatch(path.name) is not None


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the paths of all checkpoints in a folder, lowest step first; files are not verified."""
    if not folder.is_dir():
        return []
    found = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found)]


# ---- writing


@dataclass(frozen=True)
class Digest:
    """The expected SHA-256 (hexadecimal) and size of a file."""

    sha256: str
    bytes: int


def write_json(path: Path, value: Any) -> Digest:
    """Writes and fsyncs a JSON file. Returns the file's digest."""
    data = (json.dumps(value, indent=None if path.name == INDEX else 2) + "\n").encode()
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Digest(hashlib.sha256(data).hexdigest(), len(data))


def write_checksums(directory: Path, digests: dict[str, Digest]) -> None:
    """Writes checksums.json: the digest of each file by name, and one digest of this list."""
    files = {name: asdict(digest) for name, digest in sorted(digests.items())}
    write_json(directory / CHECKSUMS, {"files": files, "digest": _digest_of(files)})


def _digest_of(files: dict) -> str:
    """Returns the SHA-256 of the list of files and digests, which shows whether checksums.json itself is damaged."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def remove_leftovers(folder: Path) -> None:
    """Deletes the hidden directories that interrupted saves and deletions left in a folder."""
    for path in list(folder.iterdir()):
        if is_leftover(path):
            remove(path)


class Keep(NamedTuple):
    """Which checkpoints to keep.

    Attributes:
        last: number of newest checkpoints to keep.
        every: checkpoints whose step is divisible by this number are never deleted; None: none.
        best: number of checkpoints to keep that are best by the validation metric (`weft.checkpoint.best`).
    """

    last: int
    every: int | None = None
    best: int = 0

    @classmethod
    def configured(cls, section: CheckpointSection) -> Keep:
        """Returns what the section `checkpoint` of a config keeps in the run directory."""
        return cls(section.keep_last, section.keep_every, section.keep_best)


def surplus(folder: Path, keep: Keep, newest: Path | None = None) -> list[Path]:
    """Returns the checkpoints in a folder that `prune` deletes, lowest step first. Arguments as for `prune`."""
    newest = newest or last_complete(folder, contents=False)
    if newest is None:
        return []
    found = list_checkpoints(folder)
    steps = [step_of(path) or 0 for path in found]
    kept = kept_steps(steps, keep, read_values(folder).best(steps) if keep.best > 0 else [])
    return [path for step, path in zip(steps, found, strict=True) if step not in kept and path != newest]


def kept_steps(steps: Sequence[int], keep: Keep, best: Sequence[int]) -> set[int]:
    """Returns the steps that `keep` selects.

    Args:
        steps: all steps, the lowest first.
        best: steps with a validation, the best first.
    """
    kept = {*(steps[-keep.last :] if keep.last > 0 else []), *(best[: keep.best] if keep.best > 0 else [])}
    return kept | ({step for step in steps if step % keep.every == 0} if keep.every else set())


def prune(folder: Path, keep: Keep, newest: Path | None = None) -> None:
    """Deletes all checkpoints in a folder, except `newest` and the checkpoints that `keep` selects.

    Args:
        newest: a checkpoint that is kept. Default: the last checkpoint whose files exist and have the expected sizes;
            if there is none, nothing is deleted.
    """
    for path in surplus(folder, keep, newest):
        remove(path)


def link_best(folder: Path) -> None:
    """Points the link `best` at the best checkpoint in a folder, if one has a value and the file system has links.

    Raises:
        UserError: the record of the values cannot be read.
    """
    found = {step_of(path) or 0: path for path in list_checkpoints(folder)}
    for step in read_values(folder).best(found)[:1]:
        link = partial_path(folder / BEST)
        with suppress(OSError):
            link.unlink(missing_ok=True)
            link.symlink_to(found[step].name)
            os.replace(link, folder / BEST)


# ---- verification


@dataclass(frozen=True)
class Damage:
    """A damaged file of a checkpoint.

    Attributes:
        what: the kind of damage, such as "the file is missing".
    """

    file: Path
    what: str


def parse_checksums(content: bytes) -> dict[str, Digest] | None:
    """Returns the digests that the content of checksums.json lists, by file name; None if its own digest is wrong.

    Raises:
        ValueError, KeyError, TypeError or AttributeError: the content is damaged.
    """
    listed = json.loads(content)
    if listed["digest"] != _digest_of(listed["files"]):
        return None
    return {name: Digest(entry["sha256"], entry["bytes"]) for name, entry in listed["files"].items()}


def read_checksums(directory: Path) -> dict[str, Digest] | Damage:
    """Returns the digests that checksums.json lists, by file name; a `Damage` if checksums.json is damaged."""
    path = directory / CHECKSUMS
    try:
        digests = parse_checksums(path.read_bytes())
    except FileNotFoundError:
        return Damage(path, "the file is missing")
    except OSError as error:
        return Damage(path, f"the file cannot be read: {error.strerror or error}")
    except (ValueError, KeyError, TypeError, AttributeError):
        return Damage(path, "the file is not valid JSON, or lacks entries")
    if digests is None:
        return Damage(path, "the contents of the file differ from what was written")
    for name in digests:
        if os.path.basename(name) != name:
            return Damage(path, f"the file lists a path outside the checkpoint ({name})")
    return digests


def read_index(directory: Path) -> dict[str, Any]:
    """Returns the content of index.json: the tensors of a checkpoint, and the files in which they are.

    Raises:
        UserError: the file cannot be read, has another form, or lists a file outside the checkpoint.
    """
    path = directory / INDEX
    index = read_json(path)
    try:
        for file in index["files"]:
            if os.path.basename(file) != file:
                raise UserError(f"the index lists {file!r}, which is outside the checkpoint; do not use it", path)
        for entry in index["tensors"].values():
            numbers = [*entry["shape"]]
            for number, offset, shape in entry["pieces"]:
                numbers += [*offset, *shape]
                if not len(offset) == len(shape) == len(entry["shape"]):
                    raise ValueError
                index["files"][number]
            if not all(type(number) is int and number >= 0 for number in numbers) or entry["dtype"] not in DTYPES:
                raise ValueError
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise UserError("not the index of a checkpoint; restore the checkpoint from a copy", path) from None
    return index


_verified: set[tuple] = set()  # os.stat() values of verified files, so that one process does not hash a file twice


def check(path: Path, digest: Digest, contents: bool) -> Damage | None:
    """Returns the damage of a file; None if it is undamaged. Arguments as for `find_damage`."""
    try:
        if path.is_symlink() and os.path.dirname(os.path.realpath(path)) != os.path.realpath(path.parent):
            return Damage(path, "the file is a symbolic link that leaves the checkpoint")
        stat = path.stat()
        if stat.st_size != digest.bytes:
            return Damage(path, f"the file has {stat.st_size:,} bytes instead of {digest.bytes:,}")
        identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, digest.sha256)
        if not contents or identity in _verified:
            return None
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return Damage(path, "the file is missing")
    except OSError as error:
        return Damage(path, f"the file cannot be read: {error.strerror or error}")
    if found != digest.sha256:
        return Damage(path, "the contents of the file differ from what was written (SHA-256)")
    _verified.add(identity)
    return None


def threads() -> int:
    """Returns the number of threads for reading, writing and hashing: one per CPU core, up to 8.

    One thread hashes 1 to 2 GB per second.
    """
    return min(8, usable_cores())


def total_bytes(checkpoint: Path) -> int:
    """Returns the bytes of all files of a checkpoint."""
    return sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())


def find_damage(
    directory: Path, *, contents: bool = True, rank: int = 0, world_size: int = 1, only: Collection[str] | None = None
) -> Damage | None:
    """Returns the first damaged file of a checkpoint; None if the checkpoint is undamaged.

    Args:
        only: names of the files to check. Default: all.
        contents: whether to hash the files. If False, only their existence and sizes are checked.
        rank, world_size: only every `world_size`-th file is hashed, beginning with the file at index `rank`. The sizes
            of all files are checked.
    """
    digests = read_checksums(directory)
    if isinstance(digests, Damage):
        return digests
    names = sorted(digests if only is None else only)
    for name in names:
        if (damage := check(directory / name, digests[name], contents=False)) is not None:
            return damage
    if not contents:
        return None
    with ThreadPoolExecutor(threads()) as pool:
        results = pool.map(lambda name: check(directory / name, digests[name], True), names[rank::world_size])
        damage = next(filter(None, results), None)
        pool.shutdown(cancel_futures=True)
    return damage


def last_complete(folder: Path, before: int | None = None, contents: bool = True) -> Path | None:
    """Returns the undamaged checkpoint with the highest step; None if there is none.

    Args:
        before: only checkpoints of steps below this step are considered.
        contents: whether to hash the files. If False, only their existence and sizes are checked.
    """
    for path in reversed(list_checkpoints(folder)):
        step = step_of(path)
        if (before is None or (step is not None and step < before)) and find_damage(path, contents=contents) is None:
            return path
    return None

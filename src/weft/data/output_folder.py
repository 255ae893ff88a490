"""Checks output folders before a command begins its work, and publishes folders atomically.

A folder is written under a hidden name and renamed when it is complete. It replaces only a folder of the same kind.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weft import files
from weft.errors import UserError
from weft.headers import TOKENIZER_CONFIG_FILES


@dataclass(frozen=True)
class Kind:
    """A kind of folder that Weft writes.

    Attributes:
        name: name of the kind, for messages.
        marks: names of the files that identify the kind.
        files: names of all files that are allowed in the folder.
        folders: name of each allowed subfolder -> prefixes, of which all names in the subfolder must have one.
    """

    name: str
    marks: frozenset[str]
    files: frozenset[str]
    folders: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)

    def marked(self, names: Collection[str]) -> bool:
        """Whether a folder with the entries `names` is of this kind, which means that it contains all `marks`."""
        return all(mark in names for mark in self.marks)


STORE = Kind(
    "token store",
    frozenset(["store.json", "tokens.idx"]),
    frozenset(["store.json", "tokens.bin", "tokens.idx", "loss_mask.bin", "rejects.jsonl", "duplicates.jsonl"]),
    {"packing": ("best_fit-", "pad-")},
)
TOKENIZER = Kind(
    "tokenizer",
    frozenset(["tokenizer.json", "tokenizer_config.json"]),
    frozenset(["tokenizer.json", *TOKENIZER_CONFIG_FILES, "chat_template.jinja", "chat_template.json"]),
)


def check_out(
    out: Path, kind: Kind, inputs: Iterable[Path] = (), *, overwrite: bool = False, new: bool = False
) -> None:
    """Checks, before any work, that `out` can be written, and that only a folder of kind `kind` would be replaced.

    Args:
        inputs: files and stores that are read; `out` must not be, contain or lie within one of them.
        new: if True, an existing `out` is an error unless `overwrite` is set. If False, the caller checks whether the
            existing folder can be reused.

    Raises:
        UserError: `out` is not a valid name, overlaps an input, is not writable, or exists and must not be replaced.
    """
    check_name(out)
    check_apart(out, inputs)
    exists = os.path.lexists(out)
    if exists and overwrite and (why := why_not_replaceable(out, kind)):
        raise UserError(f"exists already and {why}; choose another --out", out)
    if exists and new and not overwrite:
        raise exists_already(out, kind)
    if not exists or overwrite:
        check_parent(out)


def check_name(out: Path) -> None:
    """Raises UserError unless `out` ends with a file name of valid length."""
    if out.name in ("", ".."):
        raise UserError(
            f"--out {out}: must end with the name of the output folder; use, for example, --out {out / 'new'}"
        )
    if len(os.fsencode(files.partial_path(out).name)) > 255:  # the limit of file systems
        raise UserError(f"--out {out.name[:40]}...: the name is too long; give at most 240 characters")


def check_apart(out: Path, inputs: Iterable[Path], what: str = "input") -> None:
    """Raises UserError if `out` is, contains or lies within one of `inputs`, which the message calls `what`."""
    target = os.path.realpath(out)
    for path in inputs:
        real = os.path.realpath(path)
        if real == target:
            how = f"is the {what} {path} itself"
        elif real.startswith(target + os.sep):
            how = f"contains the {what} {path}"
        elif target.startswith(real + os.sep):
            how = f"lies in the {what} {path}"
        else:
            continue
        raise UserError(f"{how}; choose another --out", out)


def check_parent(out: Path) -> None:
    """Raises UserError if the nearest existing parent of `out` is not a writable folder."""
    parent = next(parent for parent in Path(os.path.abspath(out)).parents if os.path.lexists(parent))
    if not os.path.isdir(parent):
        raise UserError(f"cannot be created: {parent} is not a folder; choose another --out", out)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"cannot be created: {parent} is not writable; choose another --out", out)


def exists_already(out: Path, kind: Kind, what: str = "") -> UserError:
    """Returns the error for an existing `out`. If `out` may be replaced, the message recommends --overwrite.

    `what`: text that the message then has after "exists already", such as " and is older than FILE".
    """
    if why := why_not_replaceable(out, kind):
        return UserError(f"exists already and {why}; choose another --out", out)
    return UserError(f"exists already{what}; choose another --out, or use --overwrite to replace it", out)


def why_not_replaceable(out: Path, kind: Kind) -> str:
    """Returns the reason why `out` must not be replaced; "" if `out` is an empty folder or a folder of this kind."""
    if not os.path.isdir(out):
        return "is not a folder"
    try:
        with os.scandir(out) as listing:
            entries = {entry.name: entry.is_dir(follow_symlinks=False) for entry in listing}
        if not entries:
            return ""
        if not kind.marked(entries):
            return f"is not a {kind.name}"
        others = [name for name, folder in entries.items() if name not in (kind.folders if folder else kind.files)]
        for name in entries.keys() & kind.folders.keys():
            prefix = kind.folders[name]
            others += [
                f"{name}/{inner}" for inner in os.listdir(out / name) if not inner.lstrip(".").startswith(prefix)
            ]
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return f"contains {min(others)!r}, which does not belong to a {kind.name}" if others else ""


def publish(folder: Path, out: Path) -> None:
    """Syncs a complete folder to disk and renames it to `out`, replacing a folder of the same kind.

    Raises:
        UserError: `out` was created while this command ran, and is not a folder of the same kind.
    """
    files.sync_tree(folder)
    names = os.listdir(folder)
    kind = next(kind for kind in (STORE, TOKENIZER) if kind.marked(names))
    if os.path.lexists(out) and (why := why_not_replaceable(out, kind)):
        raise UserError(f"was created while this command ran, and {why}; move it away, or choose another --out", out)
    files.publish(folder, out, replace=True)

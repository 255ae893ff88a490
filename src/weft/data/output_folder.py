"""Folders that appear whole: they are made in a hidden one beside, and take their name by one rename. What they replace
is of their own kind, or nothing is replaced: a folder of the user's is never taken for one of Weft's."""

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
        name: in words.
        marks: the files by which one is known.
        files: all that there can be in it.
        folders: the folders that there can be in it, and how all that they hold is called at its beginning.
    """

    name: str
    marks: frozenset[str]
    files: frozenset[str]
    folders: Mapping[str, str] = field(default_factory=dict)

    def marked(self, names: Collection[str]) -> bool:
        """Whether a folder with these names in it is one of this kind (there may be more in it)."""
        return all(mark in names for mark in self.marks)


STORE = Kind(
    "token store",
    frozenset(["store.json", "tokens.idx"]),
    frozenset(["store.json", "tokens.bin", "tokens.idx", "loss_mask.bin", "rejects.jsonl", "duplicates.jsonl"]),
    {"packing": "best_fit-"},
)
TOKENIZER = Kind(
    "tokenizer",
    frozenset(["tokenizer.json", "tokenizer_config.json"]),
    frozenset(["tokenizer.json", *TOKENIZER_CONFIG_FILES, "chat_template.jinja", "chat_template.json"]),
)


def check_out(out: Path, kind: Kind, inputs: Iterable[Path] = (), *, overwrite: bool = False) -> None:
    """Before any work: see that the folder `out` can be made, and costs nothing but, with `overwrite`, one of its kind.

    What to do about one that is there without `overwrite` is left to the caller: `exists_already` is the error.

    Args:
        inputs: the files and stores that are read, which `out` must not be, nor hold, nor lie in.

    Raises:
        UserError: it names no folder, overlaps an input, cannot be written to, or is there and something else.
    """
    check_name(out)
    check_apart(out, inputs)
    there = os.path.lexists(out)
    if there and overwrite and (why := what_else(out, kind)):
        raise UserError(f"exists already and {why}; name another --out", out)
    if not there or overwrite:
        check_parent(out)


def check_name(out: Path) -> None:
    """`out` has a name of its own: it is not the working directory, the one above, or the disk."""
    if out.name in ("", ".."):
        raise UserError(f"--out {out}: a name is needed for what is made; such as --out {out / 'new'}")
    if len(os.fsencode(files.partial_path(out).name)) > 255:  # which is what file systems allow
        raise UserError(f"--out {out.name[:40]}...: too long a name; at most 240 characters")


def check_apart(out: Path, inputs: Iterable[Path], what: str = "input") -> None:
    """`out` is none of `inputs`, and neither lies in the other. `what`: these are, in words."""
    place = os.path.realpath(out)
    for path in inputs:
        real = os.path.realpath(path)
        if real == place:
            how = f"is the {what} {path} itself"
        elif real.startswith(place + os.sep):
            how = f"holds the {what} {path}"
        elif place.startswith(real + os.sep):
            how = f"lies in the {what} {path}"
        else:
            continue
        raise UserError(f"{how}; name another --out", out)


def check_parent(out: Path) -> None:
    """Something can be made at `out`, as far as the folders above tell."""
    for parent in Path(os.path.abspath(out)).parents:
        if not os.path.lexists(parent):
            continue
        if not os.path.isdir(parent):
            raise UserError(f"cannot be made: {parent} is no folder; name another --out", out)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise UserError(f"cannot be made: {parent} cannot be written to; name another --out", out)
        return


def exists_already(out: Path, kind: Kind, what: str = "") -> UserError:
    """The error where `out` is taken; it names --overwrite only where that would do.

    Args:
        what: more about what is there.
    """
    if why := what_else(out, kind):
        return UserError(f"exists already and {why}; name another --out", out)
    return UserError(f"exists already{what}; name another --out, or --overwrite replaces it", out)


def what_else(out: Path, kind: Kind) -> str:
    """Why what is at `out` must not be replaced by a folder of this kind; empty if it is one, or an empty folder."""
    if not os.path.isdir(out):
        return "is no folder"
    try:
        with os.scandir(out) as listing:
            entries = {entry.name: entry.is_dir(follow_symlinks=False) for entry in listing}
        if not entries:
            return ""
        if not kind.marked(entries):
            return f"is no {kind.name}"
        others = [name for name, folder in entries.items() if name not in (kind.folders if folder else kind.files)]
        for name in entries.keys() & kind.folders.keys():
            begin = kind.folders[name]
            others += [f"{name}/{inner}" for inner in os.listdir(out / name) if not inner.lstrip(".").startswith(begin)]
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if others:
        return f"holds {min(others)!r}, which no {kind.name} has"
    return ""


def publish(made: Path, out: Path) -> None:
    """Give a finished folder its name, in place of one of its kind. Afterwards it is on the disk, whatever happens.

    Raises:
        UserError: something else is there by now.
    """
    files.sync_tree(made)
    names = os.listdir(made)
    kind = next(kind for kind in (STORE, TOKENIZER) if kind.marked(names))
    if os.path.lexists(out) and (why := what_else(out, kind)):
        raise UserError(f"came into being meanwhile and {why}; move it away, or name another --out", out)
    files.publish(made, out, replace=True)

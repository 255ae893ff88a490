"""The files that the user's inputs name."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.config.errors import UserError

STANDARD_INPUT = Path("-")


def find_files(inputs: Sequence[str | Path], files_from: str | Path | None = None) -> list[Path]:
    """The files that `inputs` name, in the order given; what folders and patterns hold is sorted, each file once.

    An input is a file, a folder (searched to any depth, hidden files left out; links are followed), a folder that
    `datasets.save_to_disk` wrote (its data files, in its order), a pattern with `*`, `?`, `[...]` or `**`, or `-`,
    the standard input.

    Args:
        files_from: a text file that names more inputs, one a line; "-" reads that list from the standard input.

    Raises:
        UserError: an input does not exist, or there is none.
    """
    named = [str(i) for i in inputs]
    if files_from is not None:
        named += _listed(files_from)
    if "-" in named and str(files_from) == "-":
        raise UserError("the standard input cannot be both a list of files and an input; give one of them by a file")
    found: dict[str, Path] = {}
    for name in named:
        for path in filter(_is_document, _files(name)):
            found.setdefault(os.path.abspath(path) if path != STANDARD_INPUT else "-", path)
    if not found:
        where = ", ".join(named) or "the input"
        raise UserError(f"no files in {where}; name folders or files of text, JSON lines, Parquet, CSV or Arrow")
    return list(found.values())


def _listed(files_from: str | Path) -> list[str]:
    import sys

    try:
        raw = sys.stdin.buffer.read() if str(files_from) == "-" else Path(files_from).read_bytes()
        lines = raw.decode("utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}; --files-from names a list of files", files_from) from None
    except UnicodeDecodeError:
        raise UserError("not UTF-8; --files-from names a text file with one path a line", files_from) from None
    return [line for line in lines if line.strip()]


def _files(name: str) -> Iterator[Path]:
    path = Path(name)
    if path == STANDARD_INPUT:
        yield path
    elif path.is_dir():
        yield from _in_folder(path)
    elif path.exists():
        yield path
    elif glob.has_magic(name):
        matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise UserError("no file matches this pattern; check it (quoted, so that the shell leaves it alone)", name)
        yield from _matched(matches)
    else:
        raise UserError("no such file or folder; check the path", path)


def _matched(matches: list[str]) -> Iterator[Path]:
    """The files of a pattern's matches. `**` names a folder and all that is in it, and follows links in circles."""
    searched, seen = "", set()
    real: dict[str, str] = {}
    for match in matches:
        if searched and match.startswith(searched):
            continue
        if os.path.isdir(match):
            searched = match.rstrip("/") + "/"
            files = list(_in_folder(Path(match)))
        else:
            files = [Path(match)]
        for path in files:
            folder = str(path.parent)
            if folder not in real:
                real[folder] = os.path.realpath(folder)
            if (place := (real[folder], path.name)) not in seen:
                seen.add(place)
                yield path


def _in_folder(top: Path) -> Iterator[Path]:
    found: list[tuple[Path, list[Path]]] = []
    seen: set[str] = set()
    for folder, folders, names in os.walk(top, followlinks=True, onerror=_refuse):
        real = os.path.realpath(folder)
        if real in seen:  # a link to a folder above, or to one that was searched
            folders.clear()
            continue
        seen.add(real)
        arrow = _saved_dataset(Path(folder), names)
        if arrow is not None:
            found.append((Path(folder), arrow))
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [(p, [p]) for name in names if not name.startswith(".") and (p := Path(folder, name)).is_file()]
    for _, files in sorted(found):
        yield from files


def _is_document(path: Path) -> bool:
    """Not what tells of other files: an index of a file beside it, or which splits a dataset has."""
    indexed = path.name.removesuffix(".index.npy").removesuffix(".index.json")
    return path.name != "dataset_dict.json" and (indexed == path.name or not path.with_name(indexed).exists())


def _refuse(error: OSError) -> None:
    raise UserError(f"cannot be read: {error.strerror}; its documents would be missing", error.filename)


def _saved_dataset(folder: Path, names: list[str]) -> list[Path] | None:
    """The data files of a folder that `datasets.save_to_disk` wrote; None for any other folder."""
    if "state.json" not in names:
        return None
    state = folder / "state.json"
    try:
        content = json.loads(state.read_bytes())
        data = content["_data_files"]
        files = [folder / entry["filename"] for entry in data]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if content.get("_indices_data_files"):
        raise UserError("this dataset has a mapping of indices; save it again with a current `datasets`", state)
    for path in files:
        if not path.is_file():
            raise UserError("missing, though state.json names it; save the dataset again", path)
    return files

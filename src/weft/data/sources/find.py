"""The files that the user's inputs name."""

from __future__ import annotations

import errno
import glob
import json
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from weft.data.output_folder import STORE, TOKENIZER
from weft.errors import UserError

STANDARD_INPUT = Path("-")
Found = tuple[str, Path]  # where a file really lies, all links followed; and the path by which it was found
LeftOut = dict[str, str]  # where something lies -> why it is no document


class Files(list[Path]):
    """Files, in order.

    Attributes:
        left_out: what else folders and patterns hold, by reason: "hidden" (a folder counts once, whatever is in it),
            "dangling link", "pipe or device", "index" (of lines), "token store", "tokenizer".
    """

    def __init__(self, files: Iterable[Path] = (), left_out: Mapping[str, int] | None = None):
        super().__init__(files)
        self.left_out = Counter(left_out or {})


def find_files(inputs: Sequence[str | Path], files_from: str | Path | None = None) -> Files:
    """The files that `inputs` name, in the order given; what folders and patterns hold is sorted, each file once.

    An input is a file, a folder (searched to any depth), a folder that `datasets.save_to_disk` wrote (its data files,
    in its order), a pattern with `*`, `?`, `[...]` or `**`, or `-`, the standard input. Links to folders are followed;
    what is reached in several ways is read once. In folders hidden files and folders are left out, and what is no
    document: dangling links, pipes, and the files of token stores and tokenizers.

    Args:
        inputs: as said; what this function gave is given back.
        files_from: a text file that names more inputs, one a line; "-" reads that list from the standard input.

    Raises:
        UserError: an input does not exist, or there is none.
    """
    if isinstance(inputs, Files) and files_from is None:
        return inputs
    named = [str(i) for i in inputs]
    if files_from is not None:
        named += _listed(files_from)
    if "-" in named and str(files_from) == "-":
        raise UserError("the standard input cannot be both a list of files and an input; give one of them by a file")
    found: dict[str, Path] = {}
    others: LeftOut = {}
    for name in named:
        for place, path in _files(name, others):
            if path.name == "dataset_dict.json":
                continue  # says which splits a dataset has
            if _is_index(path):
                others[place] = "index"
            else:
                found.setdefault(place, path)
    left_out = Counter(reason for place, reason in others.items() if place not in found)
    if not found:
        where = ", ".join(named) or "the input"
        besides = f" ({summary(left_out)} left out)" if left_out else ""
        raise UserError(
            f"no files in {where}{besides}; name folders or files of text, JSON lines, Parquet, CSV or Arrow"
        )
    return Files(found.values(), left_out)


def summary(counts: Mapping[str, int]) -> str:
    """`2 hidden, 1 dangling link`."""
    return ", ".join(f"{number:,} {reason}" for reason, number in counts.items())


def _listed(files_from: str | Path) -> list[str]:
    try:
        raw = sys.stdin.buffer.read() if str(files_from) == "-" else Path(files_from).read_bytes()
        lines = raw.decode("utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}; --files-from names a list of files", files_from) from None
    except UnicodeDecodeError:
        raise UserError("not UTF-8; --files-from names a text file with one path a line", files_from) from None
    return [line for line in lines if line.strip()]


def _files(name: str, left_out: LeftOut) -> Iterator[Found]:
    path = Path(name)
    if path == STANDARD_INPUT:
        yield "-", path
    elif path.is_dir():
        yield from _in_folder(path, left_out)
    elif path.exists():
        yield os.path.realpath(path), path
    elif glob.has_magic(name):
        matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise UserError("no file matches this pattern; check it (quoted, so that the shell leaves it alone)", name)
        yield from _matched(matches, left_out)
    else:
        raise UserError("no such file or folder; check the path", path)


def _matched(matches: list[str], left_out: LeftOut) -> Iterator[Found]:
    """The files of a pattern's matches. `**` names a folder and all that is in it, and follows links in circles."""
    searched = ""
    for match in matches:
        if searched and match.startswith(searched):
            continue
        if os.path.isdir(match):
            searched = match.rstrip("/") + "/"
            yield from _in_folder(Path(match), left_out)
        elif os.path.isfile(match):
            yield os.path.realpath(match), Path(match)
        else:
            folder, name = os.path.split(match)
            what = "pipe or device" if os.path.exists(match) else "dangling link"
            left_out[os.path.join(os.path.realpath(folder), name)] = what


def _in_folder(top: Path, left_out: LeftOut) -> Iterator[Found]:
    found: list[tuple[Path, list[Found]]] = []
    seen: set[str] = set()
    folders, links = [top], []
    while folders or links:
        # Links last: what has a path without one is found by that.
        folder = folders.pop() if folders else links.pop(0)
        real = os.path.realpath(folder)
        if real in seen:  # by a link to a folder above, or to one that was searched
            continue
        seen.add(real)
        try:
            with os.scandir(folder) as listing:
                entries = {entry.name: entry for entry in listing}
        except OSError:  # reading it will say what is wrong: its documents would be missing
            found.append((folder, [(real, folder)]))
            continue
        arrow = _saved_dataset(folder, entries)
        if arrow is not None:
            found.append((folder, [(os.path.realpath(path), path) for path in arrow]))
            continue
        for kind in (STORE, TOKENIZER):
            if kind.marked(entries):
                left_out[real] = kind.name
                for name in (*kind.files, *kind.folders):
                    entries.pop(name, None)
        inner = []
        for name in sorted(entries):
            entry, path = entries[name], folder / name
            what = "hidden" if name.startswith(".") else _what(entry)
            if what == "folder":
                (links if entry.is_symlink() else inner).append(path)
            elif what == "file":
                place = os.path.realpath(path) if entry.is_symlink() else os.path.join(real, name)
                found.append((path, [(place, path)]))
            else:
                left_out[os.path.join(real, name)] = what
        folders += reversed(inner)
    for _, files in sorted(found, key=lambda entry: entry[0]):
        yield from files


def _what(entry: os.DirEntry[str]) -> str:
    """A folder, a file, or why it is neither."""
    try:
        if entry.is_dir():
            return "folder"
        if entry.is_file():
            return "file"
        os.stat(entry.path)
    except FileNotFoundError:
        return "dangling link"
    except OSError as error:
        return "dangling link" if error.errno == errno.ELOOP else "file"  # reading it will say what is wrong
    return "pipe or device"


def _is_index(path: Path) -> bool:
    """Whether it is an index of the file beside it."""
    indexed = path.name.removesuffix(".index.npy").removesuffix(".index.json")
    return indexed != path.name and path.with_name(indexed).exists()


def _saved_dataset(folder: Path, names: Collection[str]) -> list[Path] | None:
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

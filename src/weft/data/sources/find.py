"""Finds input files: expands folders, patterns, and lists of files."""

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
Found = tuple[str, Path]  # a file's real path, with all links resolved, and the path by which it was found
Skipped = dict[str, str]  # real path -> why the entry was skipped


class Files(list[Path]):
    """A list of input files, in the order in which they are read.

    Attributes:
        skipped: number of skipped entries of folders and patterns, by reason: "hidden" (a folder counts once),
            "dangling link", "pipe or device", "index" (of JSON lines), "token store", "tokenizer".
    """

    def __init__(self, files: Iterable[Path] = (), skipped: Mapping[str, int] | None = None):
        super().__init__(files)
        self.skipped = Counter(skipped or {})


def find_files(inputs: Sequence[str | Path], files_from: str | Path | None = None) -> Files:
    """Returns the files that `inputs` name, in the order of `inputs`. Files of folders and patterns are sorted.

    An input is a file, a folder (searched recursively), a folder that `datasets.save_to_disk` wrote (its data files in
    the order of the dataset), a pattern with `*`, `?`, `[...]` or `**`, or `-`, the standard input. Links to folders
    are followed. Each file is listed once. In folders, hidden entries, dangling links, pipes, devices, and the files of
    token stores and tokenizers are skipped.

    Args:
        inputs: paths and patterns; a `Files` is returned unchanged.
        files_from: a text file that lists more inputs, one per line; "-" reads the list from the standard input.

    Raises:
        UserError: an input does not exist, or no file was found.
    """
    if isinstance(inputs, Files) and files_from is None:
        return inputs
    names = [str(i) for i in inputs]
    if files_from is not None:
        names += _read_list(files_from)
    if "-" in names and str(files_from) == "-":
        raise UserError("the standard input is both an input and the list of files; use a file for one of the two")
    found: dict[str, Path] = {}
    others: Skipped = {}
    for name in names:
        for real, path in _expand(name, others):
            if path.name == "dataset_dict.json":
                continue  # lists the splits of a dataset
            if _is_index(path):
                others[real] = "index"
            else:
                found.setdefault(real, path)
    skipped = Counter(reason for real, reason in others.items() if real not in found)
    if not found:
        where = ", ".join(names) or "the input"
        also = f" ({format_counts(skipped)} skipped)" if skipped else ""
        raise UserError(f"no files in {where}{also}; name folders or files of text, JSON lines, Parquet, CSV or Arrow")
    return Files(found.values(), skipped)


def format_counts(counts: Mapping[str, int]) -> str:
    """Returns counts as text, such as `2 hidden, 1 dangling link`."""
    return ", ".join(f"{number:,} {reason}" for reason, number in counts.items())


def _read_list(files_from: str | Path) -> list[str]:
    try:
        raw = sys.stdin.buffer.read() if str(files_from) == "-" else Path(files_from).read_bytes()
        lines = raw.decode("utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(
            f"cannot be read: {error.strerror}; --files-from needs a text file with one path per line", files_from
        ) from None
    except UnicodeDecodeError:
        raise UserError("not UTF-8; --files-from needs a text file with one path per line", files_from) from None
    return [line for line in lines if line.strip()]


def _expand(name: str, skipped: Skipped) -> Iterator[Found]:
    path = Path(name)
    if path == STANDARD_INPUT:
        yield "-", path
    elif path.is_dir():
        yield from _walk(path, skipped)
    elif path.exists():
        yield os.path.realpath(path), path
    elif glob.has_magic(name):
        matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise UserError(
                "no file matches this pattern; check the pattern, and quote it so that the shell does not expand it",
                name,
            )
        yield from _expand_matches(matches, skipped)
    else:
        raise UserError("no such file or folder; check the path", path)


def _expand_matches(matches: list[str], skipped: Skipped) -> Iterator[Found]:
    """Yields the matches of a pattern that are files, and the files in the matches that are folders.

    Adds each skipped entry to `skipped`: path -> reason.

    `**` matches a folder and also the content of the folder, and follows circular links. So matches within a folder
    that was already searched are ignored.
    """
    walked = ""
    for match in matches:
        if walked and match.startswith(walked):
            continue
        if os.path.isdir(match):
            walked = match.rstrip("/") + "/"
            yield from _walk(Path(match), skipped)
        elif os.path.isfile(match):
            yield os.path.realpath(match), Path(match)
        else:
            folder, name = os.path.split(match)
            reason = "pipe or device" if os.path.exists(match) else "dangling link"
            skipped[os.path.join(os.path.realpath(folder), name)] = reason


def _walk(top: Path, skipped: Skipped) -> Iterator[Found]:
    found: list[tuple[Path, list[Found]]] = []
    seen: set[str] = set()
    folders, links = [top], []
    while folders or links:
        # Links come last, so that a file is found by its path without links if it has one.
        folder = folders.pop() if folders else links.pop(0)
        real = os.path.realpath(folder)
        if real in seen:  # a link to a parent folder, or to a folder that was already searched
            continue
        seen.add(real)
        try:
            with os.scandir(folder) as listing:
                entries = {entry.name: entry for entry in listing}
        except OSError:  # kept as a file, so that reading it reports the error and no document is lost silently
            found.append((folder, [(real, folder)]))
            continue
        arrow = _saved_dataset(folder, entries)
        if arrow is not None:
            found.append((folder, [(os.path.realpath(path), path) for path in arrow]))
            continue
        for kind in (STORE, TOKENIZER):
            if kind.marked(entries):
                skipped[real] = kind.name
                for name in (*kind.files, *kind.folders):
                    entries.pop(name, None)
        subfolders = []
        for name in sorted(entries):
            entry, path, place = entries[name], folder / name, os.path.join(real, name)
            what = "hidden" if name.startswith(".") else _classify(entry)
            if what == "folder":
                (links if entry.is_symlink() else subfolders).append(path)
            elif what == "file":
                found.append((path, [(os.path.realpath(path) if entry.is_symlink() else place, path)]))
            else:
                skipped[place] = what
        folders += reversed(subfolders)
    for _, files in sorted(found, key=lambda entry: entry[0]):
        yield from files


def _classify(entry: os.DirEntry[str]) -> str:
    """Returns "folder", "file", or why the entry is skipped ("dangling link", "pipe or device")."""
    try:
        if entry.is_dir():
            return "folder"
        if entry.is_file():
            return "file"
        os.stat(entry.path)
    except FileNotFoundError:
        return "dangling link"
    except OSError as error:
        return "dangling link" if error.errno == errno.ELOOP else "file"  # reading it reports the error
    return "pipe or device"


def _is_index(path: Path) -> bool:
    """Whether the file belongs to the index (`weft data index`) of another file in the same folder."""
    indexed = path.name.removesuffix(".index.npy").removesuffix(".index.json")
    return indexed != path.name and path.with_name(indexed).exists()


def _saved_dataset(folder: Path, names: Collection[str]) -> list[Path] | None:
    """Returns the data files of a folder that `datasets.save_to_disk` wrote; None for any other folder."""
    if "state.json" not in names:
        return None
    state = folder / "state.json"
    try:
        content = json.loads(state.read_bytes())
        files = [folder / entry["filename"] for entry in content["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if content.get("_indices_data_files"):
        raise UserError(
            "this dataset has an indices mapping; save it again with a current version of `datasets`", state
        )
    for path in files:
        if not path.is_file():
            raise UserError("missing, but listed in state.json; save the dataset again", path)
    return files

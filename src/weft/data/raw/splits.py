"""Finds the files of raw data. Of a folder with splits, only the split for training or for validation is read."""

from __future__ import annotations

import json
import re
from pathlib import Path

from weft.data.sources import Files, find_files
from weft.errors import UserError

# The names of split files, as Hugging Face `datasets` finds them: train.jsonl, test-00000-of-00002.parquet, ...
SPLIT = re.compile(r"(train|training|validation|valid|val|dev|test|eval|evaluation)(?:[-_.].*)?", re.IGNORECASE)
SAME = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation"} | {
    "eval": "test",
    "evaluation": "test",
}
# Files beside the data of a dataset, which are no data: hidden files, README.md, dataset_infos.json, ...
ABOUT = re.compile(r"\..*|.*\.(md|ya?ml|py)|licen[sc]e.*|dataset_infos?\.json", re.IGNORECASE)


def find_raw_files(path: str, *, held_out: bool) -> Files:
    """Returns the files that a path or pattern of raw data names.

    A folder can have splits: a `datasets.DatasetDict` that `save_to_disk` wrote, or only files and folders whose names
    begin with `train`, `validation` or `test`, in the folder itself or in its folder `data`. Then the result has the
    files of one split.

    Args:
        held_out: whether to take the split `validation`, instead of `train`.

    Raises:
        UserError: no file was found, or a folder has several splits, but not this one.
    """
    splits = _splits(Path(path)) if Path(path).is_dir() else {}
    if not splits:
        return find_files([path])
    wanted = "validation" if held_out else "train"
    if wanted not in splits and len(splits) > 1:
        what = f"has the splits {', '.join(splits)}, but none is called {wanted}"
        raise UserError(f"{what}; set the path of one split, such as {splits[next(iter(splits))][0]}", path)
    return find_files(splits.get(wanted) or next(iter(splits.values())))


def _splits(folder: Path) -> dict[str, list[Path]]:
    """Returns the paths of each split in a folder by name; {} if the folder has no splits."""
    listed = folder / "dataset_dict.json"
    if listed.is_file():
        try:
            return {name: [folder / name] for name in json.loads(listed.read_bytes())["splits"]}
        except (ValueError, KeyError, TypeError):
            raise UserError("not a list of splits; save the dataset again", listed) from None
    found: dict[str, list[Path]] = {}
    for place in (folder, folder / "data"):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            match = SPLIT.fullmatch(path.name.partition(".")[0])
            if match is not None:
                found.setdefault(SAME.get(match[1].lower(), match[1].lower()), []).append(path)
            elif not ABOUT.fullmatch(path.name) and path != folder / "data":
                return {}  # not only splits: all files are read
    return found

"""Defines `compare_checkpoints`, which lists the tensors and values in which two checkpoints differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.saved_tensor import SavedTensor
from weft.checkpoint.weights import checkpoint_tensors
from weft.files import read_json
from weft.formatting import flat


@dataclass(frozen=True)
class Difference:
    """A tensor or a value that differs.

    Attributes:
        name: name of the tensor, such as `model.embed.weight`, or `state.json: step` for a value of a JSON file.
        what: description of the difference.
        largest: largest absolute difference of the elements; infinity if one element is NaN or infinite; None for other
            differences.
    """

    name: str
    what: str
    largest: float | None = None


def compare_checkpoints(first: Path, second: Path) -> tuple[list[Difference], int]:
    """Compares two checkpoints block by block, whatever meshes saved them.

    Returns:
        The differences, and the number of tensors that were compared.
    """
    one, two = (dict(checkpoint_tensors(path, "")) for path in (first, second))
    found = []
    for name in sorted(one.keys() | two.keys()):
        if name not in one or name not in two:
            found.append(Difference(name, f"only in {(first if name in one else second).name}"))
        elif (difference := _compare(name, one[name], two[name])) is not None:
            found.append(difference)
    for file in (files.MODEL, files.OPTIMIZER, files.STATE):
        before, after = (flat(read_json(path / file) or {}) for path in (first, second))
        found += [
            Difference(f"{file}: {key}", _change(before.get(key), after.get(key)))
            for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key)
        ]
    return found, len(one.keys() & two.keys())


def _change(before: object, after: object) -> str:
    """Returns "old -> new"; of lists, such as the last losses, their lengths and the first item that differs."""
    if not (isinstance(before, list) and isinstance(after, list)):
        return f"{before} -> {after}"
    pairs = zip_longest(before, after, fillvalue="(no item)")
    index, one, two = next((i, a, b) for i, (a, b) in enumerate(pairs) if a != b)
    return f"{len(before)} -> {len(after)} items; first at index {index}: {one} -> {two}"


def _compare(name: str, one: SavedTensor, two: SavedTensor) -> Difference | None:
    kinds = [f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in (one, two)]
    if one.shape != two.shape:
        return Difference(name, " -> ".join(kinds))
    count, largest = 0, 0.0
    for before, after in zip(one.blocks(one.rows), two.blocks(one.rows), strict=True):
        if before.dtype == after.dtype and torch.equal(_bits(before), _bits(after)):
            continue
        before, after = before.double(), after.double()
        distance = (before - after).abs()
        same = (before == after) | (before.isnan() & after.isnan())
        distance = torch.where(same, 0.0, torch.nan_to_num(distance, nan=math.inf, posinf=math.inf))
        count += int((~same).sum())
        largest = max(largest, float(distance.max()))
    if count:
        total = math.prod(one.shape)
        return Difference(name, f"{count:,} of {total:,} elements, by up to {largest:.3g}", largest)
    return Difference(name, " -> ".join(kinds)) if one.dtype != two.dtype else None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)

"""Reads the headers of the weight files of a Hugging Face folder: which tensors each file has."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import torch

from weft.checkpoint.checkpoint_files import DTYPES
from weft.checkpoint.huggingface import pickled
from weft.checkpoint.huggingface.quantized import StoredTensor
from weft.errors import UserError
from weft.families.config_json import INDEX, SINGLE
from weft.files import read_json

_HEADER_LIMIT = 100 * 2**20  # the limit of the safetensors library
_DTYPES = {external: getattr(torch, name) for name, external in DTYPES.items()}
_PICKLE_ONLY = (
    "the weights are pickled (.bin), and loading a pickle can run any program; use a copy with safetensors, or, if you "
    "trust these files, run weft import {path} OUT --allow-pickle"
)


def read_headers(path: Path, *, allow_pickle: bool = False) -> dict[str, StoredTensor]:
    """Returns the file, dtype and shape of each tensor in a folder's weight files, by tensor name.

    Raises:
        UserError: a file is missing or truncated, or the weights are pickled and `allow_pickle` is false.
    """
    found: dict[str, StoredTensor] = {}
    for file, expected in _tensor_files(path, allow_pickle).items():
        binary = file.endswith(pickled.SUFFIX)
        index = pickled.INDEX if binary else INDEX
        if not (path / file).is_file():
            raise UserError(f"this file, which {index} lists, is missing; download the missing files", path / file)
        with open(path / file, "rb") as opened:
            if opened.read(8) == b"version ":
                raise UserError("this file is a Git LFS pointer, not the weights; run git lfs pull", path / file)
        header = _read_pickled_header(path / file) if binary else read_header(path / file)
        lacking = sorted(expected - header.keys())
        if lacking:
            raise UserError(
                f"{lacking[0]}, which {index} lists in this file, is missing; download both files again", path / file
            )
        found |= header
    return found


_KINDS = ((INDEX, SINGLE, ".safetensors"), (pickled.INDEX, pickled.SINGLE, pickled.SUFFIX))


def file_warnings(path: Path) -> list[str]:
    """Returns a warning if a folder has both a single file of weights and an index of several files."""
    for index, single, _ in _KINDS:
        found = [name for name in (single, index) if (path / name).is_file()]
        if found:
            both = f"both {single} and {index} exist; {single} is read, as in transformers"
            return [both] if len(found) > 1 else []
    return []


def _tensor_files(path: Path, allow_pickle: bool) -> dict[str, set[str]]:
    """Returns weight file -> names of its tensors, from the index; an empty set for a single file without an index."""
    for index, single, suffix in _KINDS[: 2 if allow_pickle else 1]:
        if (path / single).is_file():
            return {single: set()}
        if (path / index).is_file():
            return _read_index(path / index, suffix)
    others = sorted(found.name for found in path.iterdir())
    shards = [name for name in others if re.fullmatch(r"model-\d+-of-\d+\.safetensors", name)]
    if shards:
        raise UserError(
            f"{INDEX}, the index of {shards[0]} and the other files of weights, is missing; download it, too", path
        )
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in others):
        raise UserError(_PICKLE_ONLY.format(path=path), path)
    adapter = "it is an adapter; merge it with its base model first"
    what = adapter if "adapter_config.json" in others else "download the weights"
    raise UserError(f"this folder has no {SINGLE}; {what}", path)


def _read_index(index: Path, suffix: str) -> dict[str, set[str]]:
    content = read_json(index)
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise UserError("not an index of tensors: weight_map is missing; download the file again", index)
    files: dict[str, set[str]] = {}
    for name, file in weights.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(suffix):
            raise UserError(
                f"{name} is listed in {file!r}, which is not a {suffix} file of this folder; download the index again",
                index,
            )
        files.setdefault(file, set()).add(name)
    return dict(sorted(files.items()))


def _read_pickled_header(path: Path) -> dict[str, StoredTensor]:
    return {name: StoredTensor(path.name, one.dtype, tuple(one.shape)) for name, one in pickled.tensors(path).items()}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file by name, from its header. Raises UserError if the file is damaged."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or (length <= _HEADER_LIMIT and 8 + length > size):
            raise UserError(
                f"the file is truncated: it ends within its header, after {size:,} bytes; download the file again", path
            )
        text = file.read(length) if length <= _HEADER_LIMIT else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        offsets = {name: entry["data_offsets"] for name, entry in header.items()}
        places = sorted((int(start), int(stop), name) for name, (start, stop) in offsets.items())
        found = {
            name: StoredTensor(path.name, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
            for name, entry in header.items()
        }
    except KeyError as error:
        raise UserError(
            f"the header of the file has an unknown dtype or lacks a key ({error}); download the file again", path
        ) from None
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError):
        raise UserError("not a safetensors file; download the file again", path) from None
    end = 0
    for start, stop, name in places:
        if start != end or stop - start != math.prod(found[name].shape) * found[name].dtype.itemsize:
            raise UserError(f"the header of the file has wrong offsets for {name}; download the file again", path)
        end = stop
    expected = 8 + length + end
    if size < expected:
        raise UserError(f"the file is truncated: {size:,} bytes instead of {expected:,}; download the file again", path)
    if size > expected:
        raise UserError(
            f"the file has {size:,} bytes, but its header requires {expected:,}; download the file again", path
        )
    return found

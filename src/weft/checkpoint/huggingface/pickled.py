"""Reads pickled weights (`.bin` files) with torch's restricted unpickler, which builds only tensors."""

from __future__ import annotations

import contextlib
import pickle
import warnings
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from weft.errors import UserError

INDEX = "pytorch_model.bin.index.json"
SINGLE = "pytorch_model.bin"
SUFFIX = ".bin"


@contextlib.contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """Context manager that opens a safetensors or `.bin` file.

    Yields an object with safetensors' methods `get_tensor` and `get_slice`. Callers pass `.bin` files only if the user
    has set `allow_pickle`.
    """
    if file.suffix == SUFFIX:
        yield _Pickled(tensors(file))
    else:
        with safe_open(file, framework="pt") as found:
            yield found


class _Pickled(dict[str, torch.Tensor]):
    get_tensor = get_slice = dict.__getitem__  # tensors can be sliced, like the result of safetensors' `get_slice`


def tensors(file: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a `.bin` file by name. Their contents are memory-mapped.

    Raises:
        UserError: the file is truncated, torch.save did not write it, or it contains more than named tensors.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            found = _load(file, file.stat().st_mtime_ns)
    except pickle.UnpicklingError:
        raise UserError(
            "not loaded: the file contains more than tensors, or torch.save did not write it; convert it to "
            "safetensors with the program that wrote it",
            file,
        ) from None
    except (RuntimeError, EOFError, OSError) as error:
        what = str(error).splitlines()[0] if str(error) else "the file is truncated"
        raise UserError(f"cannot be read ({what}); download the file again", file) from None
    named = isinstance(found, dict) and all(isinstance(name, str) for name in found)
    if not named or not all(isinstance(one, torch.Tensor) and one.layout == torch.strided for one in found.values()):
        raise UserError("the file is not a dictionary of tensors by name; save the model's state_dict() instead", file)
    return found


@lru_cache(maxsize=1)
def _load(file: Path, modified: int) -> Any:
    """Loads a file. The last result is cached, because files of PyTorch before 1.6 cannot be read tensor by tensor.

    Args:
        modified: modification time of the file, so that a changed file is loaded again.
    """
    return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))


@contextlib.contextmanager
def released() -> Iterator[None]:
    """Frees the memory of the last `.bin` file at the end of a `with` block, or of a function that it decorates."""
    try:
        yield
    finally:
        _load.cache_clear()

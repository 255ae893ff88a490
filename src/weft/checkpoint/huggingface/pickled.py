"""Tensors out of a `.bin` file, for those who ask for it, by torch's restricted unpickler: it builds tensors only."""

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
def opened(file: Path) -> Iterator[Any]:
    """A file of tensors, with `get_tensor` and `get_slice` as safetensors has them.

    Only a folder that was opened with `allow_pickle` names files that are pickled.
    """
    if file.suffix == SUFFIX:
        yield _Pickled(tensors(file))
    else:
        with safe_open(file, framework="pt") as found:
            yield found


class _Pickled(dict[str, torch.Tensor]):
    get_tensor = get_slice = dict.__getitem__  # a tensor can be cut itself


def tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of a `.bin` file by their names; their contents are read when they are looked at.

    Raises:
        UserError: not whole, not one of torch's, or it holds more than named tensors.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            found = _load(file, file.stat().st_mtime_ns)
    except pickle.UnpicklingError:
        raise UserError(
            "it holds more than tensors, or it is no file of torch.save's; that is never read: convert it to "
            "safetensors where it was made",
            file,
        ) from None
    except (RuntimeError, EOFError, OSError) as error:
        what = str(error).splitlines()[0] if str(error) else "it ends too early"
        raise UserError(f"cannot be read ({what}); download it again", file) from None
    named = isinstance(found, dict) and all(isinstance(name, str) for name in found)
    if not named or not all(isinstance(one, torch.Tensor) and one.layout == torch.strided for one in found.values()):
        raise UserError("it does not hold tensors by their names, as a model's weights are saved", file)
    return found


@lru_cache(maxsize=1)
def _load(file: Path, modified: int) -> Any:
    """Kept, as its tensors are asked for in turn: a file of a PyTorch before 1.6 cannot be read in parts."""
    return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))


def forget() -> None:
    """Give back the memory of the last file."""
    _load.cache_clear()

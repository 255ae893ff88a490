"""Reads a slice of a parameter of Weft's model from Hugging Face's files, and no more of the file than that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.huggingface.pickled import open_tensors
from weft.checkpoint.huggingface.quantized import DTYPE, Quantized
from weft.models.huggingface_weights import Transform

_CACHE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Source:
    """Where a parameter of Weft's model is stored.

    Attributes:
        name: of the stored tensor; of the first expert's, for a stack of experts.
        transform: converts the stored tensor to the parameter.
        shape: of the parameter.
        experts: the source of each expert, if each is a tensor in the files.
    """

    name: str
    transform: Transform | None
    shape: tuple[int, ...]
    experts: tuple[Source, ...] = ()


class OpenFileCache:
    """Opens files and keeps the last one open, so that its header is not parsed again for each of thousands of experts.

    Pages that are read stay in this process's memory until their file is closed, which happens after 32 MiB.
    """

    def __init__(self) -> None:
        self._stack, self._file, self._found, self._bytes = contextlib.ExitStack(), None, None, 0

    @contextlib.contextmanager
    def __call__(self, file: Path) -> Iterator[Any]:
        if file != self._file or self._bytes > _CACHE_BYTES:
            self._stack.close()
            self._found, self._file, self._bytes = self._stack.enter_context(open_tensors(file)), file, 0
        yield self._found

    def count(self, tensor: torch.Tensor) -> None:
        """Adds a tensor to the bytes read from the open file."""
        self._bytes += tensor.nbytes

    def __enter__(self) -> OpenFileCache:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def read_slice(
    file: Path | Quantized,
    source: Source,
    start: tuple[int, ...],
    size: tuple[int, ...],
    open_file: Callable[[Path], AbstractContextManager[Any]] = open_tensors,
) -> torch.Tensor:
    """Returns the slice of a parameter that begins at `start`, of shape `size`, on the CPU, in its stored dtype.

    The file is opened per call, which releases the pages read, unless `open_file` is an `OpenFileCache`.
    """
    with contextlib.nullcontext(file) if isinstance(file, Quantized) else open_file(file) as opened:
        if 0 in size:
            stored: Any = opened.get_slice(source.name)
            return torch.empty(size, dtype=DTYPE if isinstance(file, Quantized) else stored[:0].dtype)
        if not source.shape or (source.transform is None and size == source.shape):
            return opened.get_tensor(source.name)
        stored = opened.get_slice(source.name)
        transform = source.transform or Transform()
        if transform.stacked:
            each, experts = replace(transform, stacked=False), range(start[0], start[0] + size[0])
            return torch.stack([_transformed(_Expert(stored, e), each, start[1:], size[1:]) for e in experts])
        return _transformed(stored, transform, start, size)


@dataclass(frozen=True)
class _Expert:
    """One expert of a stored tensor `[expert, ...]`."""

    stored: Any
    expert: int

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        return self.stored[(slice(self.expert, self.expert + 1), *place)][0]


def _transformed(stored, transform: Transform, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
    rows = (start[0], start[0] + size[0])
    rest = tuple(slice(begin, begin + length) for begin, length in zip(start[1:], size[1:], strict=True))
    if not transform.sizes:
        return _rows(stored, transform, rows, rest)
    height, total = transform.sizes[transform.part], sum(transform.sizes)
    before = sum(transform.sizes[: transform.part])
    if transform.groups == 1:
        return _rows(stored, transform, (before + rows[0], before + rows[1]), rest)
    first, last = rows[0] // height, -(-rows[1] // height)  # the groups that contain the rows
    found = _rows(stored, transform, (first * total, last * total), rest)
    found = found.reshape(last - first, total, *found.shape[1:])[:, before : before + height].flatten(0, 1)
    return found[rows[0] - first * height : rows[1] - first * height]


def _rows(stored, transform: Transform, rows: tuple[int, int], rest: tuple[slice, ...]) -> torch.Tensor:
    """Returns rows of the stored tensor, transposed if the parameter is."""
    if not transform.transposed:
        return stored[(slice(*rows), *rest)]
    return stored[(*rest, slice(*rows))].T

"""Reads slices of the parameters of Weft's model from Hugging Face files, without reading full tensors."""

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
    """The stored tensor from which a parameter of Weft's model is read.

    Attributes:
        name: name of the stored tensor. If experts are stored as separate tensors, the name of the first one.
        transform: conversion of the stored tensor to the parameter; None: no conversion.
        shape: shape of the parameter.
        experts: the source of each expert, if the experts are stored as separate tensors.
    """

    name: str
    transform: Transform | None
    shape: tuple[int, ...]
    experts: tuple[Source, ...] = ()


class OpenFileCache:
    """Opens files and keeps the last file open, so that its header is not parsed again for each expert.

    Memory-mapped pages stay in this process's memory until their file is closed. Therefore a file is closed and opened
    again after 32 MiB were read.
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
        """Counts the bytes of a tensor that was read from the open file."""
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
    """Returns a slice of a parameter, on the CPU, in the stored dtype (bfloat16 for a quantized tensor).

    Args:
        file: the file that contains the stored tensor, or a `Quantized` if the stored tensor is quantized.
        start: index at which the slice begins, for each dimension.
        size: shape of the slice.
        open_file: function that opens a file; an `OpenFileCache` keeps the file open between calls.
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
            return torch.stack([transformed(_Expert(stored, e), each, start[1:], size[1:]) for e in experts])
        return transformed(stored, transform, start, size)


@dataclass(frozen=True)
class _Expert:
    """One expert of a stored tensor `[expert, ...]`, which can be sliced like a tensor of an open file."""

    stored: Any
    expert: int

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        return self.stored[(slice(self.expert, self.expert + 1), *place)][0]


def transformed(stored, transform: Transform, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
    """Returns a slice of a parameter: reads the necessary slice of the tensor `stored`, and applies `transform` to it.

    Args:
        start, size: index at which the parameter's slice begins, and the shape of this slice.
    """
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
    """Returns a slice of a stored tensor; if `transform.transposed` is true, a slice of its transpose.

    Args:
        rows: first row of the slice, and the row after its last row.
        rest: slices of the other dimensions.
    """
    if not transform.transposed:
        return stored[(slice(*rows), *rest)]
    return stored[(*rest, slice(*rows))].T

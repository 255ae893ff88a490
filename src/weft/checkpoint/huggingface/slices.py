"""Reading a rectangle of one of our tensors out of theirs, and no more than that of the file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.huggingface.pickled import opened as open_tensors
from weft.checkpoint.huggingface.quantized import DTYPE, Packed
from weft.models.huggingface_weights import Transform

_HELD = 32 * 2**20  # bytes


@dataclass(frozen=True)
class Source:
    """Where one of our tensors is found.

    Attributes:
        theirs: the name of theirs; of the first expert's, for a stack of them.
        transform: how ours is made from it.
        shape: of ours.
        experts: where each expert's is found, if they are tensors of their own.
    """

    theirs: str
    transform: Transform | None
    shape: tuple[int, ...]
    experts: tuple[Source, ...] = ()


class Held:
    """Opens files for one reader and leaves the last one open for the next tensor in it, which saves reading its
    header again for each of thousands of experts.

    Pages that are read stay in this process's memory until their file is closed: that happens after `_HELD` bytes.
    """

    def __init__(self) -> None:
        self._stack, self._file, self._found, self._bytes = contextlib.ExitStack(), None, None, 0

    @contextlib.contextmanager
    def __call__(self, file: Path) -> Iterator[Any]:
        if file != self._file or self._bytes > _HELD:
            self.close()
            self._found, self._file = self._stack.enter_context(open_tensors(file)), file
        yield self._found

    def count(self, tensor: torch.Tensor) -> None:
        """Say what was read."""
        self._bytes += tensor.nbytes

    def close(self) -> None:
        self._stack.close()
        self._file, self._found, self._bytes = None, None, 0

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_part(
    file: Path | Packed,
    source: Source,
    start: tuple[int, ...],
    size: tuple[int, ...],
    open_tensors: Callable[[Path], AbstractContextManager[Any]] = open_tensors,
) -> torch.Tensor:
    """The rectangle of ours that begins at `start` and measures `size`, on the CPU, as it is stored.

    `file` is a tensor's numbers and scales where it is quantized, and what they stand for is read.

    The file is opened for each call, unless `open_tensors` is a `Held`: pages of it that were read do not stay in this
    process's memory.
    """
    with contextlib.nullcontext(file) if isinstance(file, Packed) else open_tensors(file) as opened:
        if 0 in size:
            stored: Any = opened.get_slice(source.theirs)
            return torch.empty(size, dtype=DTYPE if isinstance(file, Packed) else stored[:0].dtype)
        if not source.shape:
            return opened.get_tensor(source.theirs)
        if source.transform is None and size == source.shape:
            return opened.get_tensor(source.theirs)
        stored = opened.get_slice(source.theirs)
        transform = source.transform or Transform()
        rows = (start[0], start[0] + size[0])
        if transform.stacked:
            one = replace(transform, stacked=False)
            return torch.stack([_rectangle(_Slab(stored, expert), one, start[1:], size[1:]) for expert in range(*rows)])
        return _rectangle(stored, transform, start, size)


@dataclass(frozen=True)
class _Slab:
    """One expert's of a tensor `[expert, ...]` in a file."""

    stored: Any
    expert: int

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        return self.stored[(slice(self.expert, self.expert + 1), *place)][0]


def _rectangle(stored, transform: Transform, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
    """The rectangle of ours out of one of theirs."""
    rows = (start[0], start[0] + size[0])
    rest = tuple(slice(begin, begin + length) for begin, length in zip(start[1:], size[1:], strict=True))
    if not transform.sizes:
        return _rows(stored, transform, rows, rest)
    height, whole = transform.sizes[transform.part], sum(transform.sizes)
    before = sum(transform.sizes[: transform.part])
    if transform.groups == 1:
        return _rows(stored, transform, (before + rows[0], before + rows[1]), rest)
    first, last = rows[0] // height, -(-rows[1] // height)  # the groups that our rows are in
    found = _rows(stored, transform, (first * whole, last * whole), rest)
    found = found.reshape(last - first, whole, *found.shape[1:])[:, before : before + height].flatten(0, 1)
    return found[rows[0] - first * height : rows[1] - first * height]


def _rows(stored, transform: Transform, rows: tuple[int, int], rest: tuple[slice, ...]) -> torch.Tensor:
    """Rows of their tensor, turned to lie as ours does."""
    if not transform.transposed:
        return stored[(slice(*rows), *rest)]
    return stored[(*rest, slice(*rows))].T

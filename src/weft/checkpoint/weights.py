"""The tensors of any saved model, whoever saved it: their names, what they are, and their rows block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from weft.checkpoint import files
from weft.checkpoint.huggingface.export import their_entries
from weft.checkpoint.huggingface.folder import HuggingFaceFolder, file_notes, headers, open_folder
from weft.checkpoint.huggingface.pickled import opened
from weft.checkpoint.load import read_json, resolve
from weft.checkpoint.model import architecture
from weft.checkpoint.tensors import MODEL_PREFIX
from weft.config.errors import UserError
from weft.config.huggingface import is_huggingface
from weft.config.model import ModelSection

BLOCK = 4 * 2**20  # bytes that are worked on at once; a row is never divided


@dataclass(frozen=True)
class Saved:
    """One saved tensor. `blocks(n)` reads it from the first row to the last, n rows at a time, on the CPU."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[int], Iterator[torch.Tensor]]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Of a block of about `BLOCK` bytes."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        return max(1, BLOCK // max(1, row))


@dataclass(frozen=True)
class Weights:
    """A saved model.

    Attributes:
        path: what `resolve` made of the path.
        huggingface: whether names and shapes are those of Hugging Face's files; else the decoder's own.
        tensors: all of them, in their order.
        file: of Hugging Face's files, where each tensor lies.
        notes: what of the files is not taken as it is.
    """

    path: Path
    huggingface: bool
    tensors: Mapping[str, Saved]
    file: Mapping[str, str]
    notes: Sequence[str] = ()


def open_weights(path: str | Path, *, huggingface: bool | None = None, allow_pickle: bool = False) -> Weights:
    """Open a run, a checkpoint, an imported folder or a Hugging Face folder, by headers alone.

    Args:
        huggingface: by whose names; default: those in the files. Where they are to be another's, the model must be of a
            family that is known; else any model will do.
        allow_pickle: take `.bin` files too.

    Raises:
        UserError: nothing there, damaged, or of no known family where names are to be translated.
    """
    path = resolve(path)
    theirs = is_huggingface(path)
    by_theirs = theirs if huggingface is None else huggingface
    if theirs and by_theirs:
        stored = headers(path, allow_pickle=allow_pickle)
        file = {name: one.file for name, one in stored.items()}
        found = {
            name: Saved(one.dtype, one.shape, _slices(path / one.file, name, one.shape)) for name, one in stored.items()
        }
        return Weights(path, True, found, file, file_notes(path))
    if theirs:
        folder = open_folder(path, allow_pickle=allow_pickle)
        return Weights(path, False, {name: _translated(folder, name) for name in folder.sources}, {}, folder.notes)
    if not by_theirs:
        return Weights(path, False, dict(_of_checkpoint(path)), {})
    section = architecture(path)
    if not isinstance(section, ModelSection):
        raise UserError(
            "a model of your own has no names in Hugging Face's files; give one of the built-in decoder", path
        )
    whole = their_entries(path, section, None)
    found = {one.name: Saved(one.dtype, one.shape, partial(_split, one.read)) for one in whole}
    return Weights(path, True, found, {})


def _split(read: Callable[[], torch.Tensor], rows: int) -> Iterator[torch.Tensor]:
    """Of a tensor that has to be put together whole first."""
    tensor = read()
    yield from tensor.split(rows) if tensor.dim() else [tensor]


def _in_turn(shape: tuple[int, ...], rows: int, read: Callable[[int, int], torch.Tensor]) -> Iterator[torch.Tensor]:
    for start in range(0, shape[0], rows):
        yield read(start, min(rows, shape[0] - start))


def _slices(file: Path, name: str, shape: tuple[int, ...]) -> Callable[[int], Iterator[torch.Tensor]]:
    """Of a tensor that lies whole in one file. It is opened for each block: pages that were read are let go of."""

    def read(start: int, length: int) -> torch.Tensor:
        with opened(file) as found:
            return found.get_slice(name)[start : start + length]

    def blocks(rows: int) -> Iterator[torch.Tensor]:
        try:
            if shape:
                yield from _in_turn(shape, rows, read)
            else:
                with opened(file) as found:
                    yield found.get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"cannot be read ({error}); download it again", file) from None

    return blocks


def _translated(folder: HuggingFaceFolder, name: str) -> Saved:
    shape = folder.sources[name].shape

    def read(start: int, length: int) -> torch.Tensor:
        return folder.read(name, (start, *[0] * (len(shape) - 1)), (length, *shape[1:]))

    def blocks(rows: int) -> Iterator[torch.Tensor]:
        yield from _in_turn(shape, rows, read) if shape else [folder.read(name)]

    return Saved(folder.dtype(name), shape, blocks)


def _of_checkpoint(checkpoint: Path) -> Iterator[tuple[str, Saved]]:
    """The model's tensors, out of the ranks' files."""
    index = read_json(checkpoint, files.INDEX)
    for name, entry in index["tensors"].items():
        if not name.startswith(MODEL_PREFIX):
            continue
        shape, pieces = tuple(entry["shape"]), entry["pieces"]
        places = [(checkpoint / index["files"][number], offset, size) for number, offset, size in pieces]
        dtype = getattr(torch, entry["dtype"])
        if len(places) == 1:
            blocks = _slices(places[0][0], name, shape)
        else:
            blocks = partial(_gathered, name, dtype, shape, places)
        yield name.removeprefix(MODEL_PREFIX), Saved(dtype, shape, blocks)


def _gathered(name: str, dtype: torch.dtype, shape: tuple, places: list, rows: int) -> Iterator[torch.Tensor]:
    """Of a tensor in pieces: for each block what each of them has of it."""

    def read(start: int, length: int) -> torch.Tensor:
        block = torch.empty((length, *shape[1:]), dtype=dtype)
        for file, offset, size in places:
            first, last = max(start, offset[0]), min(start + length, offset[0] + size[0])
            if first < last:
                rest = tuple(slice(begin, begin + many) for begin, many in zip(offset[1:], size[1:], strict=True))
                with safe_open(file, framework="pt") as found:
                    block[(slice(first - start, last - start), *rest)] = found.get_slice(name)[
                        first - offset[0] : last - offset[0]
                    ]
        return block

    yield from _in_turn(shape, rows, read)

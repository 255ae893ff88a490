"""The tensors of any saved model, whoever saved it: names, dtypes, shapes, and rows read when they are needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.huggingface.folder import HuggingFaceFolder, file_notes, groups, headers, open_folder
from weft.checkpoint.huggingface.pickled import opened
from weft.checkpoint.load import read_json, resolve
from weft.checkpoint.load_model import architecture
from weft.checkpoint.tensors import MODEL_PREFIX
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.families.config_json import is_huggingface
from weft.models.huggingface_weights import Transform, invert

BLOCK = 4 * 2**20  # bytes that are worked on at once; a row is never divided


@dataclass(frozen=True)
class Saved:
    """One saved tensor.

    Attributes:
        read: `read(start, length)` gives so many rows on the CPU; of a tensor without dimensions, all of it.
        at_once: every `read` makes all rows.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]
    at_once: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Of a block of about `BLOCK` bytes."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        return max(1, BLOCK // max(1, row))

    def whole(self) -> torch.Tensor:
        """All of it."""
        return self.read(0, self.shape[0] if self.shape else 1)

    def blocks(self, rows: int) -> Iterator[torch.Tensor]:
        """From the first row to the last, `rows` at a time."""
        if not self.shape:
            yield self.whole()
        elif self.at_once:
            yield from self.whole().split(rows)
        else:
            for start in range(0, self.shape[0], rows):
                yield self.read(start, min(rows, self.shape[0] - start))


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
            name: Saved(one.dtype, one.shape, _rows(path / one.file, name, one.shape)) for name, one in stored.items()
        }
        return Weights(path, True, found, file, file_notes(path))
    if theirs:
        folder = open_folder(path, allow_pickle=allow_pickle)
        return Weights(path, False, {name: _translated(folder, name) for name in folder.sources}, {}, folder.notes)
    ours = dict(_of_checkpoint(path))
    if not by_theirs:
        return Weights(path, False, ours, {})
    section = architecture(path)
    if not isinstance(section, ModelSection):
        raise UserError(
            "a model of your own has no names in Hugging Face's files; give one of the built-in decoder", path
        )
    return Weights(path, True, their_tensors(path, section, ours), {})


def their_tensors(path: Path, section: ModelSection, ours: Mapping[str, Saved]) -> dict[str, Saved]:
    """Hugging Face's tensors, each to be put together from ours. Raises UserError if one of ours is missing."""
    found: dict[str, Saved] = {}
    for theirs, parts in groups(section).items():
        for name, _ in parts:
            if name not in ours:
                raise UserError(f"it lacks {name}, which its model.json means; it is damaged", path)
        saved, transform = [ours[name] for name, _ in parts], parts[0][1]
        expert = None if transform is None else transform.expert
        shapes = [one.shape if expert is None else one.shape[1:] for one in saved]
        shape = tuple(invert(transform, [torch.empty(one, device="meta") for one in shapes]).shape)
        found[theirs] = Saved(saved[0].dtype, shape, partial(_inverted, saved, transform, expert), at_once=True)
    return found


def _inverted(
    saved: list[Saved], transform: Transform | None, expert: int | None, start: int, length: int
) -> torch.Tensor:
    tensor = invert(transform, [one.whole() if expert is None else one.read(expert, 1)[0] for one in saved])
    return tensor[start : start + length] if tensor.dim() else tensor


def _rows(file: Path, name: str, shape: tuple[int, ...]) -> Callable[[int, int], torch.Tensor]:
    """Of a tensor that lies whole in one file. It is opened for each block: pages that were read are let go of."""

    def read(start: int, length: int) -> torch.Tensor:
        try:
            with opened(file) as found:
                return found.get_slice(name)[start : start + length] if shape else found.get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"cannot be read ({error}); download it again", file) from None

    return read


def _translated(folder: HuggingFaceFolder, name: str) -> Saved:
    shape = folder.sources[name].shape

    def read(start: int, length: int) -> torch.Tensor:
        if not shape:
            return folder.read(name)
        return folder.read(name, (start, *[0] * (len(shape) - 1)), (length, *shape[1:]))

    return Saved(folder.dtype(name), shape, read)


def _of_checkpoint(checkpoint: Path) -> Iterator[tuple[str, Saved]]:
    """The model's tensors, out of the ranks' files."""
    index = read_json(checkpoint, files.INDEX)
    for name, entry in index["tensors"].items():
        if not name.startswith(MODEL_PREFIX):
            continue
        shape, dtype = tuple(entry["shape"]), getattr(torch, entry["dtype"])
        places = [(checkpoint / index["files"][number], offset, size) for number, offset, size in entry["pieces"]]
        one = len(places) == 1
        read = _rows(places[0][0], name, shape) if one else partial(_gathered, name, dtype, shape, places)
        yield name.removeprefix(MODEL_PREFIX), Saved(dtype, shape, read)


def _gathered(name: str, dtype: torch.dtype, shape: tuple, places: list, start: int, length: int) -> torch.Tensor:
    """Rows of a tensor in pieces: of each piece, what it has of them."""
    block = torch.empty((length, *shape[1:]), dtype=dtype)
    for file, offset, size in places:
        first, last = max(start, offset[0]), min(start + length, offset[0] + size[0])
        if first < last:
            rest = tuple(slice(begin, begin + many) for begin, many in zip(offset[1:], size[1:], strict=True))
            with safe_open(file, framework="pt") as found:
                rows = found.get_slice(name)[first - offset[0] : last - offset[0]]
                block[(slice(first - start, last - start), *rest)] = rows
    return block

"""Describes how another program's checkpoint stores the tensors of the built-in decoder, and converts both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from weft.checkpoint.saved_tensor import SavedTensor
from weft.checkpoint.tensor_file import Entry
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.formatting import first_few
from weft.models.decoder import Decoder
from weft.models.huggingface_weights import saved_dtype, saved_tensors
from weft.models.initialize import on_meta

_NAMED = 6  # maximum number of mismatched tensors that a message lists


@dataclass(frozen=True)
class Chunk:
    """A tensor of another program's checkpoint, or the slice of one layer.

    Attributes:
        name: name of the stored tensor.
        sources: names of Weft's tensors, which the stored tensor concatenates.
        layer: index of the layer in the first dimension of the stored tensor; None: the tensor has no such dimension.
        layers: size of this dimension.
        dim: dimension along which the sources are concatenated: 1 for stacked experts, otherwise 0.
        groups: number of groups of rows; each group has rows of all sources, one source after another. 1 with `dim` 1.
        rotary_heads: number of heads whose rows are stored with the rotary dimensions (2 i, 2 i + 1) as pairs, where
            Weft has the pairs (i, i + head_dim / 2); 0: as in Weft.
        padded_rows: number of rows of the stored tensor, if it has rows of zeros after Weft's rows.
    """

    name: str
    sources: tuple[str, ...]
    layer: int | None = None
    layers: int = 0
    dim: int = 0
    groups: int = 1
    rotary_heads: int = 0
    padded_rows: int | None = None

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Converts Weft's tensors to the stored tensor, without its dimension of layers."""
        stored = tensors[0]
        if self.dim:
            stored = torch.cat(list(tensors), dim=self.dim)
        elif len(tensors) > 1:
            rest = stored.shape[1:]
            stored = torch.cat([one.reshape(self.groups, -1, *rest) for one in tensors], dim=1).reshape(-1, *rest)
        if self.rotary_heads:
            stored = _swap(stored, (self.rotary_heads, 2, -1))
        if self.padded_rows is not None:
            padding = stored.new_zeros((self.padded_rows - len(stored), *stored.shape[1:]))
            stored = torch.cat([stored, padding])
        return stored

    def split(self, stored: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Converts a stored tensor, without its dimension of layers, to Weft's tensors: the inverse of `join`.

        Args:
            sizes: size of each of Weft's tensors in dimension `dim`.
        """
        if self.padded_rows is not None:
            stored = stored[: sizes[0]]
        if self.rotary_heads:
            stored = _swap(stored, (self.rotary_heads, -1, 2))
        if self.dim or len(sizes) == 1:
            return list(stored.split(list(sizes), dim=self.dim))
        rest = stored.shape[1:]
        parts = stored.reshape(self.groups, -1, *rest).split([size // self.groups for size in sizes], dim=1)
        return [part.reshape(-1, *rest) for part in parts]


def _swap(x: torch.Tensor, view: tuple[int, int, int]) -> torch.Tensor:
    """Splits the rows into `view` and exchanges the two inner dimensions."""
    return x.reshape(*view, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def model_shapes(section: ModelSection) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a decoder's tensors by name."""
    with on_meta():
        return {name: tuple(tensor.shape) for name, tensor in saved_tensors(Decoder(section)).items()}


@dataclass(frozen=True)
class Layout:
    """The layout of a model in another program's checkpoint.

    Attributes:
        section: the `model` section.
        chunks: all slices of all stored tensors.
        optional: names of stored tensors that need not exist, because they repeat other tensors.
    """

    section: ModelSection
    chunks: Sequence[Chunk]
    optional: frozenset[str] = field(default_factory=frozenset)

    def entries(
        self, tensors: Mapping[str, SavedTensor], kind: torch.dtype | None
    ) -> tuple[list[Entry], dict[str, tuple[int, ...]]]:
        """Returns the entries to write, and the shape of each stored tensor by name.

        Args:
            tensors: the tensors of Weft's model.
            kind: dtype to write. Default: as saved.
        """
        found, shapes = [], {}
        for chunk in self.chunks:
            saved = [tensors[name] for name in chunk.sources]
            shape = _joined_shape(chunk, [one.shape for one in saved])
            dtype = saved_dtype(chunk.sources[0], kind, saved[0].dtype)
            read = partial(_read_joined, chunk, saved)
            if chunk.layer is None:
                shapes[chunk.name] = shape
                found.append(Entry(chunk.name, dtype, shape, read))
            else:
                shapes[chunk.name] = (chunk.layers, *shape)
                found.append(Entry(chunk.name, dtype, (1, *shape), read, (chunk.layer, *[0] * len(shape))))
        return found, shapes

    def convert(self, path: Path, stored: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
        """Returns the tensors of Weft's model, which are read from stored tensors.

        Args:
            path: path of the checkpoint, for messages.

        Raises:
            UserError: a stored tensor is missing, has another shape, or does not belong to the model.
        """
        shapes = model_shapes(self.section)
        places: dict[str, tuple[Chunk, int]] = {}
        problems: list[str] = []
        for chunk in self.chunks:
            if chunk.name not in stored:
                problems += [] if chunk.name in self.optional else [f"{chunk.name} is missing"]
                continue
            shape = _joined_shape(chunk, [shapes[name] for name in chunk.sources])
            expected = shape if chunk.layer is None else (chunk.layers, *shape)
            if stored[chunk.name].shape != expected:
                given = list(stored[chunk.name].shape)
                problems.append(f"{chunk.name} has shape {given}, but the model requires {list(expected)}")
            for number, name in enumerate(chunk.sources):
                places.setdefault(name, (chunk, number))
        known = {chunk.name for chunk in self.chunks}
        problems += [f"{name} does not belong to this model" for name in stored if name not in known]
        if problems := list(dict.fromkeys(problems)):
            summary = f"the tensors do not match the {self.section.family} model"
            raise UserError(f"{summary}: {first_few(problems, _NAMED, '; ')}", path)
        found = {}
        for name, shape in shapes.items():
            chunk, number = places[name]
            sizes = [shapes[source][chunk.dim] for source in chunk.sources]
            read = partial(_read_split, chunk, number, sizes, stored[chunk.name])
            found[name] = SavedTensor(stored[chunk.name].dtype, shape, read, reads_all=True)
        return found


def _joined_shape(chunk: Chunk, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(chunk.join([torch.empty(shape, device="meta") for shape in shapes]).shape)


def _read_joined(chunk: Chunk, saved: Sequence[SavedTensor]) -> torch.Tensor:
    joined = chunk.join([one.full() for one in saved])
    return joined if chunk.layer is None else joined.unsqueeze(0)


def _read_split(
    chunk: Chunk, number: int, sizes: Sequence[int], stored: SavedTensor, start: int, length: int
) -> torch.Tensor:
    """Reads `length` rows, from row `start`, of a chunk's source with index `number`."""
    tensor = stored.full() if chunk.layer is None else stored.read(chunk.layer, 1)[0]
    return chunk.split(tensor, sizes)[number][start : start + length]

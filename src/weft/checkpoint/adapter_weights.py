"""Reads the adapter of a checkpoint, and merges an adapter with the weights of its base model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from weft.checkpoint.base_model import AnyModelSection
from weft.checkpoint.model_parts import HEADS
from weft.checkpoint.weights import SavedTensor, Weights, checkpoint_tensors
from weft.config.adapter import AdapterSection, layer_of, trained_heads
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.models.adapter import linear_layers
from weft.models.build import build_model
from weft.models.huggingface_weights import saved_dtype
from weft.models.initialize import on_meta
from weft.models.layers.blockwise import dequantize_blocks, quantize_blocks
from weft.models.low_rank import LowRank


def read_adapter(checkpoint: Path, section: AdapterSection) -> dict[str, LowRank]:
    """Reads the adapter of a checkpoint: name of a weight of the model, without `.weight` -> its change.

    With PiSSA, the change of the base model's weight is `scale * (b @ a - b0 @ a0)`, of twice the rank.

    Args:
        checkpoint: path of a checkpoint of an adapter.
        section: the section `adapter` that the checkpoint was saved with.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, saved in checkpoint_tensors(checkpoint):
        if (place := layer_of(name)) is not None:
            found.setdefault(place[0], {})[place[1]] = saved.full()
    changes = {}
    for layer, values in found.items():
        a, b = values["lora_a"], values["lora_b"]
        if "lora_a0" in values:
            a, b = torch.cat((a, values["lora_a0"]), -2), torch.cat((b, -values["lora_b0"]), -1)
        changes[layer] = LowRank(a, b, section.scale, values.get("lora_magnitude"))
    return changes


def read_heads(checkpoint: Path, section: AnyModelSection) -> dict[str, torch.Tensor]:
    """Returns the weights that a checkpoint of an adapter has in full: the head of a reward model, by its name.

    Args:
        section: the section `model` of the checkpoint.
    """
    heads = trained_heads(section)
    return {name: saved.full() for name, saved in checkpoint_tensors(checkpoint) if name in heads} if heads else {}


def replace_heads(base: Weights, heads: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> Weights:
    """Returns the weights of a model with the heads of a reward model in place of the model's own.

    Args:
        dtype: dtype of the heads. Default: that of the other weights.
    """
    if not heads:
        return base
    kind = dtype or next(one.dtype for one in base.tensors.values() if one.dtype.is_floating_point)
    new = {name: SavedTensor(kind, tuple(one.shape), partial(_rows, one.to(kind))) for name, one in heads.items()}
    return replace(base, tensors={name: one for name, one in base.tensors.items() if name not in HEADS} | new)


@dataclass
class Rounding:
    """Measures what part of an adapter is lost because merged weights are rounded to their dtype.

    Attributes:
        change: sum of the squares of the changes of all weights.
        error: sum of the squares of the rounding errors of these weights.
    """

    change: float = 0.0
    error: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, before: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        """Counts a block of weights: before the merge, after the merge, and after the merge in the saved dtype."""
        change = (exact - before.to(exact.dtype)).square().sum(dtype=torch.float64).item()
        error = (rounded.to(exact.dtype) - exact).square().sum(dtype=torch.float64).item()
        with self._lock:
            self.change, self.error = self.change + change, self.error + error

    @property
    def loss(self) -> float:
        """The norm of the rounding errors divided by the norm of the changes; 0 if nothing changes."""
        return (self.error / self.change) ** 0.5 if self.change else 0.0


def merge_weights(
    base: Weights,
    changes: Mapping[str, LowRank],
    full: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    rounding: Rounding,
) -> Weights:
    """Returns the weights of a base model with an adapter. They are computed in at least float32, when they are read.

    Args:
        base: the base model.
        changes: name of a weight, without `.weight` -> its change.
        full: name of a weight -> the weight that replaces it before `changes` are added.
        dtype: dtype of the merged weights. Default: the dtypes of the base model.
        rounding: counts the merged weights when they are read.

    Raises:
        UserError: the base model has no such weight, or the weight has another shape.
    """
    tensors = dict(base.tensors)
    for name, weight in full.items():
        if name not in tensors or tensors[name].shape != tuple(weight.shape):
            raise UserError(f"the adapter replaces {name}, which the base model does not have in this shape", base.path)
        tensors[name] = replace(tensors[name], read=partial(_rows, weight.to(tensors[name].dtype)), reads_all=False)
    for layer, change in changes.items():
        name = layer if layer in tensors else f"{layer}.weight"
        shape = (*change.b.shape[:-1], change.a.shape[-1])
        if name not in tensors or tensors[name].shape != shape:
            found = f"its shape is {list(tensors[name].shape)}" if name in tensors else "it is missing"
            raise UserError(
                f"the adapter changes {name} of shape {list(shape)}, but {found} in the base model", base.path
            )
        saved = tensors[name]
        kind = saved_dtype(name, dtype, saved.dtype)
        tensors[name] = replace(saved, dtype=kind, read=partial(_merged, saved, change, kind, rounding))
    return replace(base, tensors=tensors)


def dequantized_weights(section: AnyModelSection, base: Weights, how: str) -> Weights:
    """Returns the weights of a base model with the quantization error of a run with `adapter.quantize`.

    The linear layers and experts of the blocks are quantized and dequantized when they are read, in float32. A run in
    bfloat16 computes with the same weights, rounded.

    Args:
        section: the model's section.
        how: the format, "nf4" or "int8".
    """
    with on_meta() if isinstance(section, ModelSection) else contextlib.nullcontext():
        layers = linear_layers(build_model(section))
    tensors = dict(base.tensors)
    for layer in layers:
        name = layer if layer in tensors else f"{layer}.weight"
        tensors[name] = replace(tensors[name], read=partial(_dequantized, tensors[name], how))
    return replace(base, tensors=tensors)


def _dequantized(saved: SavedTensor, how: str, start: int, length: int) -> torch.Tensor:
    codes, scale = quantize_blocks(saved.read(start, length), how)
    return dequantize_blocks(codes, scale.to(torch.float32))


def _rows(weight: torch.Tensor, start: int, length: int) -> torch.Tensor:
    return weight[start : start + length] if weight.dim() else weight


def _merged(
    saved: SavedTensor, change: LowRank, kind: torch.dtype, rounding: Rounding, start: int, length: int
) -> torch.Tensor:
    """Returns `length` rows (or experts) of a merged weight, beginning with row `start`, in the dtype `kind`."""
    rows = slice(start, start + length)
    a = change.a[rows] if change.a.dim() == 3 else change.a
    magnitude = None if change.magnitude is None else change.magnitude[rows]
    before = saved.read(start, length)
    exact = LowRank(a, change.b[rows], change.scale, magnitude).merged(before)
    merged = exact.to(kind)
    rounding.add(before, exact, merged)
    return merged

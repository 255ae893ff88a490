"""Quantization-aware training (QAT; Jacob et al., 2018), with torchao's linear layers.

Before each product, the weight, and with `int8_int4` also the activations, are rounded to the values that they have
after quantization ("fake quantization"). In backward the rounding counts as the identity, so the optimizer updates the
unrounded weights. Parameters, their names and checkpoints are those of a run without QAT.

- `int4`: weights as `weft generate --quantize int4` rounds them (`weft.models.quantized`). torchao has no fake
  quantizer with this choice of scales.
- `int8_int4`: torchao's int8 activations with a scale and a zero point per token, and int4 weights with a scale per
  group, the largest absolute value / 7.5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from weft.config.adapter import STACKED
from weft.config.training import QatSection
from weft.kernels.grouped import grouped_linear
from weft.models.decoder import Decoder
from weft.models.layers.moe import Experts
from weft.models.quantize import linears_to_quantize
from weft.models.quantized import round_to_int4
from weft.parallel.local_parameters import local
from weft.parallel.model_state import ModelState
from weft.parallel.ranks import error_on_all_ranks
from weft.parallel.torchao import quiet_import, raise_unless_installed

Quantizer = Callable[[torch.Tensor], torch.Tensor]


def fake_quantize(model: nn.Module, section: QatSection, state: ModelState) -> None:
    """Makes the layers that `weft.models.quantize.quantize` quantizes round their weights, in place.

    Args:
        model: a full model or a pipeline stage, with plain (unsharded) parameters.

    Raises:
        UserError: torchao is not installed, or a matrix has a number of columns that the groups of `int8_int4` do not
            divide.
    """
    state.world.agree(lambda: raise_unless_installed("training.qat", "qat"))
    with quiet_import():
        from torchao.quantization.qat import FakeQuantizedLinear  # pyright: ignore[reportMissingImports]
    head = None if isinstance(model, Decoder) else getattr(model, "get_output_embeddings", lambda: None)()
    fakes_head = isinstance(model, Decoder)
    for _, name, linear in linears_to_quantize(model):
        fakes_head = fakes_head or linear is head
        _check_columns(name, linear.in_features, section)
        # The module stays the same object: its name, tied parameters and frozen parameters do not change.
        linear.__class__ = FakeQuantizedLinear
        linear.weight_fake_quantizer, linear.activation_fake_quantizer = _quantizers(section)
    for module in model.modules():
        if isinstance(module, Experts):
            for name in STACKED:
                _check_columns(name, getattr(module, name).shape[-1], section)
            module.product = partial(_grouped, *_quantizers(section))
    for name in ("token_logprobs", "logits") if fakes_head else ():
        if (function := getattr(model, name, None)) is not None:
            label = f"QAT: fake quantization ({section.type})"
            state.fill(model, name, label, partial(_head, function, *_quantizers(section)))


def raise_if_groups_split(model: nn.Module, section: QatSection) -> None:
    """Raises UserError if `tp` splits groups of columns, whose scales would then depend on the number of ranks."""
    for name, parameter in model.named_parameters():
        sharded = isinstance(parameter, DTensor) and Shard(parameter.ndim - 1) in parameter.placements
        if sharded and parameter.ndim > 1 and local(parameter).shape[-1] % section.group_size:
            raise error_on_all_ranks(
                f"training.qat: parallel.tp would split the groups of {section.group_size} columns of {name} "
                f"{list(parameter.shape)}; use a smaller tp"
            )


class _StraightThrough(torch.autograd.Function):
    """Calls a function that rounds a tensor. In backward, it counts as the identity (Bengio et al., 2013)."""

    @staticmethod
    def forward(ctx, x, function):
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _FakeQuantizer(nn.Module):
    """Rounds a tensor to the values that it has after quantization; takes the place of torchao's fake quantizers.

    Those assign scales to attributes, which `torch.compile` does not support within activation checkpointing.
    """

    def __init__(self, function: Quantizer):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _StraightThrough.apply(x, self.function)


def _quantizers(section: QatSection) -> tuple[Any, Any]:
    """Returns the fake quantizers of a layer's weight and of its activations (None: they are not quantized)."""
    if section.type == "int4":
        return _FakeQuantizer(round_to_int4), None
    return _FakeQuantizer(_rounding(section.group_size, (-8, 7))), _FakeQuantizer(_rounding(None, (-128, 127)))


def _rounding(columns: int | None, limits: tuple[int, int]) -> Quantizer:
    """Returns a function that quantizes and dequantizes a tensor `[..., in]` with torchao.

    Args:
        columns: number of columns with a common scale, and without a zero point; None: the scale and the zero point of
            all columns.
        limits: smallest and largest integer.
    """
    # Imported here, because `torch.compile` does not trace imports.
    from torchao.quantization.quant_primitives import (  # pyright: ignore[reportMissingImports]
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    kind = MappingType.ASYMMETRIC if columns is None else MappingType.SYMMETRIC

    def call(x: torch.Tensor) -> torch.Tensor:
        block: Any = (*(1,) * (x.ndim - 1), columns or x.shape[-1])
        integer = torch.int8
        eps = None if columns is None else torch.finfo(x.dtype).smallest_normal
        wide = torch.promote_types(x.dtype, torch.float32)
        scale, zero = choose_qparams_affine(x, kind, block, integer, *limits, eps, wide, torch.int32)
        integers = quantize_affine(x, block, scale, zero, integer, *limits)
        return dequantize_affine(integers, block, scale, zero, integer, *limits, output_dtype=x.dtype)

    return call


def _check_columns(name: str, columns: int, section: QatSection) -> None:
    if section.type != "int4" and columns % section.group_size:
        raise error_on_all_ranks(
            f"training.qat.group_size: {section.group_size} does not divide the {columns} columns of {name}; choose a "
            "divisor"
        )


def _grouped(
    weight_quantizer: Quantizer,
    quantizer: Quantizer | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Computes `grouped_linear` of fake-quantized factors, for stacked experts."""
    rounded = weight_quantizer(weight.flatten(0, 1)).view_as(weight)
    return grouped_linear(x if quantizer is None else quantizer(x), rounded, ends)


def _head(
    function: Callable,
    weight_quantizer: Quantizer,
    quantizer: Quantizer | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *arguments: Any,
    **options: Any,
) -> torch.Tensor:
    """Calls `function`, which is `token_logprobs` or `logits` of a model, with fake-quantized factors."""
    hidden = hidden if quantizer is None else quantizer(hidden)
    return function(hidden, weight_quantizer(weight), *arguments, **options)

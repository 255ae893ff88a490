"""Linear layers and stacked experts with a low-rank adapter (LoRA; Hu et al., 2021) or a quantized weight.

A layer with weight W, low-rank matrices A `[r, in]` and B `[out, r]`, and the scale s maps x to

    (W + s B A) x = W x + s B (A x)

With DoRA (Liu et al., 2024), each row of W + s B A is divided by its norm and multiplied by a trained magnitude; a row
of zeros stays as it is. The norm counts as a constant in backward, as in section 4.3 of the paper.

The matrices are parameters of the layer: `lora_a`, `lora_b`, `lora_magnitude`. Experts, whose weights are stacked, have
for example `gate_proj_lora_a` `[experts, r, in]` beside `gate_proj`. If W is quantized, `weight` contains the codes and
`weight_scale` the scales of `weft.models.layers.blockwise`; experts have `gate_proj` and `gate_proj_scale`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from weft.kernels.grouped import grouped_linear
from weft.models.layers.blockwise import QuantizedGroupedProduct, QuantizedProduct, dequantize_blocks
from weft.models.layers.dropout import Dropout
from weft.models.low_rank import dora_gain

ALL = slice(None)


class Lora(nn.Module):
    """The settings of the adapter of one layer, without parameters.

    Attributes:
        scale: factor of B A.
        dropout: dropout of the inputs of A.
        sum_inputs: function that sums a tensor over the ranks that have other input features of the layer. `parallel/`
            sets it if a DoRA layer's input features are sharded.
    """

    def __init__(self, scale: float, dropout: float):
        super().__init__()
        self.scale, self.dropout = scale, Dropout(dropout)
        self.sum_inputs: Callable[[torch.Tensor], torch.Tensor] | None = None

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}"


def lora_linear(linear: Any, x: torch.Tensor, rows: slice = ALL) -> torch.Tensor:
    """Computes the output of a linear layer with an adapter or a quantized weight: `[..., in]` -> `[..., out]`.

    Args:
        linear: an `nn.Linear` that `add_adapter` has changed.
        rows: the output features to compute.
    """
    lora, flat, bias = getattr(linear, "lora", None), x.reshape(-1, x.shape[-1]), linear.bias
    bias = bias if bias is None else bias[rows]
    if lora is None:
        return base_product(linear, flat, rows, bias).view(*x.shape[:-1], -1)
    magnitude = getattr(linear, "lora_magnitude", None)
    low = F.linear(lora.dropout(x), linear.lora_a).flatten(0, -2)
    out = base_product(linear, flat, rows, bias if magnitude is None else None)
    out = torch.addmm(out, low, linear.lora_b[rows].T, alpha=lora.scale)
    if magnitude is not None:
        norm = row_norms(linear, rows)
        out = out * dora_gain(magnitude[rows], norm.to(magnitude.dtype))
        out = out if bias is None else out + bias
    return out.view(*x.shape[:-1], -1)


def base_product(linear: Any, x: torch.Tensor, rows: slice = ALL, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies `[tokens, in]` by the layer's own weight, and adds `bias`: `[tokens, out]`."""
    if not has_quantized_weight(linear):
        return F.linear(x, linear.weight[rows], bias)
    out = QuantizedProduct.apply(x, linear.weight[rows].to(linear.code_dtype), linear.weight_scale[rows])
    return out if bias is None else out + bias


@torch.no_grad()
def row_norms(linear: Any, rows: slice = ALL) -> torch.Tensor:
    """Returns the norm of each row of W + s B A, `[out]`, in at least float32, without computing B A.

    The square of the norm of row w + s b A is |w|^2 + 2 s b (A w) + s^2 b (A A^T) b^T. Each term is a sum over input
    features, which can be sharded.
    """
    lora, weight = linear.lora, base_weight(linear, rows)
    wide = torch.promote_types(weight.dtype, torch.float32)
    weight, a, b = weight.to(wide), linear.lora_a.to(wide), linear.lora_b[rows].to(wide) * lora.scale
    parts = torch.cat((weight.square().sum(1, keepdim=True), weight @ a.T), 1)  # [out, 1 + r]
    gram = a @ a.T
    if lora.sum_inputs is not None:
        parts, gram = lora.sum_inputs(parts), lora.sum_inputs(gram)
    square, cross = parts[:, 0], parts[:, 1:]
    return (square + 2 * (b * cross).sum(1) + ((b @ gram) * b).sum(1)).clamp(min=0).sqrt()


def base_weight(linear: Any, rows: slice = ALL) -> torch.Tensor:
    """Returns the weight of a linear layer without its adapter, `[out, in]`."""
    if not has_quantized_weight(linear):
        return linear.weight[rows]
    return dequantize_blocks(linear.weight[rows].to(linear.code_dtype), linear.weight_scale[rows])


def has_quantized_weight(linear: Any) -> bool:
    """Whether the weight of a linear layer consists of codes (`weft.models.layers.blockwise`) and scales."""
    return hasattr(linear, "weight_scale")


def full_weight(linear: Any) -> torch.Tensor:
    """Returns the matrix `[out, in]` by which a linear layer multiplies, including its adapter.

    With an adapter, the matrix has at least float32: a sum in bfloat16 would lose a small change of the weight.
    """
    weight, lora = base_weight(linear), getattr(linear, "lora", None)
    if lora is None:
        return weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    weight = torch.addmm(weight.to(wide), linear.lora_b.to(wide), linear.lora_a.to(wide), alpha=lora.scale)
    magnitude = getattr(linear, "lora_magnitude", None)
    if magnitude is None:
        return weight
    return weight * dora_gain(magnitude.to(wide), row_norms(linear)).unsqueeze(1)


def weight_dtype(linear: Any) -> torch.dtype:
    """Returns the dtype in which a linear layer computes."""
    return linear.weight_scale.dtype if has_quantized_weight(linear) else linear.weight.dtype


def expert_product(experts: Any, name: str, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiplies rows by the stacked weight `name` of `Experts`, and by its adapter if it has one.

    Args:
        experts: the experts, an instance of `weft.models.layers.moe.Experts`.
        name: "gate_proj", "up_proj" or "down_proj".
        x: `[rows, in]`, sorted by expert.
        ends: int32 `[experts]`, as in `grouped_linear`.

    Returns:
        `[rows, out]`.
    """
    weight, scale = getattr(experts, name), getattr(experts, f"{name}_scale", None)
    if scale is None:
        out = experts.product(x, weight, ends)
    else:
        out = QuantizedGroupedProduct.apply(x, weight.to(experts.code_dtype), scale, ends)
    a = getattr(experts, f"{name}_lora_a", None)
    if a is None:
        return out
    low = grouped_linear(x, a, ends) * experts.lora.scale
    return out + grouped_linear(low, getattr(experts, f"{name}_lora_b"), ends)

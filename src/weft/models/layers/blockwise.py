"""Weights in 4 or 8 bits with a common scale for each block of a row, for frozen weights in training.

`nf4`: each weight is one of 16 quantiles of a normal distribution, times the scale, which is the largest absolute value
of the block (QLoRA; Dettmers et al., 2023). `int8`: each weight is an integer from -127 to 127, times the scale.

A block is a part of a row, so that matrices can be sharded along both dimensions. Its size depends only on the number
of columns. Scales are rounded to bfloat16, so that codes and scales do not depend on the compute dtype. Weights are
dequantized in the compute dtype: in bfloat16, they differ from those in float32 by rounding, at most by 1 part in 128.

Backward dequantizes the weight again, instead of keeping it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from weft.errors import UserError
from weft.kernels.grouped import grouped_linear

FORMATS = {"nf4": torch.uint8, "int8": torch.int8}  # and the dtype of the codes
PACKED = {torch.uint8: 2, torch.int8: 1}  # weights per code
_BLOCK = 64  # maximum number of weights with a common scale, as in QLoRA
_SHARDS = 8  # number of shards of a row that always consist of full blocks
# Quantiles of a normal distribution, with an exact 0 (Dettmers et al., 2023, appendix E).
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def block_size(columns: int) -> int:
    """Returns the number of weights in a block of a row with this number of columns."""
    return math.gcd(_BLOCK, columns // _SHARDS)


def quantize_blocks(weight: torch.Tensor, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes `weight` `[..., in]`.

    Args:
        how: "nf4" or "int8".

    Returns:
        Codes `[..., in / 2]` (nf4: the first of two weights is in the high half of a byte) or `[..., in]` (int8), and
        scales `[..., in / block]` in bfloat16.

    Raises:
        UserError: a weight is infinite or NaN.
    """
    blocks = weight.to(torch.float32).unflatten(-1, (-1, block_size(weight.shape[-1])))
    largest = blocks.abs().amax(-1, keepdim=True)
    if not torch.isfinite(largest).all():
        raise UserError("adapter.quantize: a weight is infinite or NaN; use another base model, or remove the key")
    scale = (largest if how == "nf4" else largest / 127).to(torch.bfloat16)
    scaled = blocks / torch.where(scale == 0, 1, scale)
    if how == "int8":
        return scaled.round_().clamp_(-127, 127).flatten(-2).to(torch.int8), scale.squeeze(-1)
    values = torch.tensor(_NF4, device=weight.device)
    codes = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2, out_int32=True).flatten(-2).to(torch.uint8)
    return (codes[..., ::2] << 4) | codes[..., 1::2], scale.squeeze(-1)


def dequantize_blocks(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns the weight `[..., in]` that `quantize_blocks` has quantized, computed in the dtype of `scale`."""
    if codes.dtype == torch.int8:
        values = codes.to(scale.dtype)
    else:
        table = torch.tensor(_NF4, dtype=scale.dtype, device=codes.device)
        pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), 1)  # [256, 2]
        values = F.embedding(codes.to(torch.int32), pairs).flatten(-2)
    return (values.unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2)


class QuantizedProduct(torch.autograd.Function):
    """Multiplies `x` `[rows, in]` by a quantized matrix `[out, in]`: `[rows, out]`."""

    @staticmethod
    def forward(ctx, x, codes, scale):
        ctx.save_for_backward(codes, scale)
        return F.linear(x, dequantize_blocks(codes, scale))

    @staticmethod
    def backward(ctx, grad):
        return grad @ dequantize_blocks(*ctx.saved_tensors), None, None


class QuantizedGroupedProduct(torch.autograd.Function):
    """Multiplies each row of `x` `[rows, in]` by its expert's quantized matrix, like `grouped_linear`."""

    @staticmethod
    def forward(ctx, x, codes, scale, ends):
        ctx.save_for_backward(codes, scale, ends)
        return grouped_linear(x, dequantize_blocks(codes, scale), ends)

    @staticmethod
    def backward(ctx, grad):
        codes, scale, ends = ctx.saved_tensors
        return grouped_linear(grad.contiguous(), dequantize_blocks(codes, scale).mT, ends), None, None, None

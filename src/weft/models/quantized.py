"""Weight-only quantization: matrices with weights in 8 or 4 bits, and activations in their usual dtype.

Weights are integers times a scale. With 8 bits, each row (output) has a scale; with 4 bits, each group of 32 columns of
a row has a scale (Dettmers & Zettlemoyer, 2023, compare numbers of bits and sizes of groups).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from weft.errors import UserError
from weft.torch_private import multiply_int4, multiply_int8, pack_int4

BITS = {"int8": 8, "int4": 4}
GROUP = 32  # columns with a common scale, with 4 bits
# Divisors of the largest weight that give the scales to try. Negative: the largest weight becomes -8; +8 does not fit.
_DIVISORS = {8: (127.0,), 4: (-9.0, -8.5, -8.0, -7.5, -7.0)}
_QUANTIZED = 1 << 17  # number of weights that are quantized at a time
_ROUNDED = {"cpu": _QUANTIZED}  # the same for `round_to_int4`; on GPUs each block costs launches of kernels
_BLOCKS = {"cpu": 1 << 20}  # number of weights that are dequantized at a time; on CPUs they stay in the cache
_BLOCK = 1 << 24
# PyTorch's kernels are faster than dequantized weights only for few rows, and only in bfloat16. For 2,048 x 8,192
# weights on one core, a row takes 2.5 ms in bfloat16, 1.2 with 8 bits and 0.8 with 4; dequantized 7 and 20 ms. The
# 4-bit kernel needs a second copy of the weights, which prompts should not make.
_KERNEL_ROWS = {8: 16, 4: 8}


class QuantizedWeight(nn.Module):
    """A quantized matrix `[out, in]`, or stacked matrices `[experts, out, in]`, in the place of a parameter.

    Args:
        shape: shape of the weight.
        bits: 8 or 4.
        dtype: dtype of the activations.
        device: device of the buffers, which are uninitialized until `fill`.

    Attributes:
        values: with 8 bits int8 `[..., out, in]`, from -127 to 127. With 4 bits uint8 `[..., out, groups, 16]`: the
            integers, from -8 to 7, plus 8; byte j of a group has column j in its low half and column j + 16 in its high
            half. Padding columns at the end are 0.
        scale: bfloat16 `[..., out]`; with 4 bits `[..., out, groups]`.
    """

    values: torch.Tensor
    scale: torch.Tensor

    def __init__(self, shape: torch.Size, bits: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        super().__init__()
        self.shape, self.bits, self.dtype = shape, bits, dtype
        groups = (*shape[:-1], -(-shape[-1] // GROUP))
        values, kind = (shape, torch.int8) if bits == 8 else ((*groups, GROUP // 2), torch.uint8)
        scale = shape[:-1] if bits == 8 else groups
        self.register_buffer("values", torch.empty(values, dtype=kind, device=device), persistent=False)
        self.register_buffer("scale", torch.empty(scale, dtype=torch.bfloat16, device=device), persistent=False)
        self._packed: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}  # for PyTorch's kernel
        self.register_state_dict_pre_hook(_refuse_saving)

    @torch.no_grad()
    def fill(self, weight: torch.Tensor, row: int = 0) -> None:
        """Quantizes `weight`, and stores the result in consecutive rows of this quantized weight.

        Args:
            weight: `[rows, in]`.
            row: index of the first row to store. Rows of stacked matrices are counted over all matrices.

        Raises:
            UserError: a weight is infinite or NaN.
        """
        values, scale = self.values.flatten(0, len(self.shape) - 2), self.scale.flatten(0, len(self.shape) - 2)
        for part in _slices(weight, _QUANTIZED):
            rows = slice(row + part.start, row + part.stop)
            values[rows], scale[rows] = _quantize(weight[part].to(self.values.device), self.bits)
        self.forget_copy()

    def forget_copy(self) -> None:
        """Frees the copy of the weight that PyTorch's 4-bit kernel uses. Later products can make a new copy."""
        self._packed.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies `[..., in]` by the matrix: `[..., out]`, in the dtype of `x`."""
        return self._multiply(x.reshape(-1, self.shape[-1]), None).view(*x.shape[:-1], -1)

    def grouped(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Multiplies each row by its expert's matrix, like `weft.kernels.grouped.grouped_linear`."""
        stops = ends.tolist()
        sizes = [stop - start for start, stop in zip([0, *stops], stops, strict=False)]
        return torch.cat([self._multiply(rows, i) for i, rows in enumerate(x.split(sizes))])

    def integers(self) -> torch.Tensor:
        """Returns the quantized integers, int8 `[..., out, in]`."""
        return self.values if self.bits == 8 else _unpack(self.values)[..., : self.shape[-1]]

    def dequantized(self) -> torch.Tensor:
        """Returns the weight `[..., out, in]`, in the dtype of the activations."""
        if self.bits == 8:
            return self.values * self.scale.unsqueeze(-1).to(self.dtype)
        return _dequantize(self.values, self.scale, self.dtype)[..., : self.shape[-1]]

    def train(self, mode: bool = True) -> QuantizedWeight:
        """Sets eval mode. Raises UserError for training mode."""
        if mode:
            raise UserError("a quantized model cannot be trained; load it without `quantize`")
        return super().train(mode)

    def extra_repr(self) -> str:
        return f"{list(self.shape)}, {self.bits} bits, {self.dtype}"

    def _multiply(self, x: torch.Tensor, expert: int | None) -> torch.Tensor:
        """Multiplies `x` `[rows, in]` by the matrix; with the index `expert`, by this expert's matrix."""
        values, scale = (b if expert is None else b[expert] for b in (self.values, self.scale))
        if self._has_kernel(x):
            if self.bits == 8:
                return multiply_int8(x, values, scale.to(x.dtype))
            if expert not in self._packed:
                self._packed[expert] = pack_int4(_unpack(values), scale.to(x.dtype))
            packed, scales = self._packed[expert]
            return multiply_int4(F.pad(x, (0, -x.shape[1] % GROUP)), packed, GROUP, scales)
        size = _BLOCKS.get(x.device.type, _BLOCK)
        if self.bits == 8:  # the integers are exact in the dtype of `x`, and scaling the product is faster
            parts = [F.linear(x, values[rows].to(x.dtype)) for rows in _slices(values, size)]
            return torch.cat(parts, -1) * scale.to(x.dtype)
        parts = [F.linear(x, _dequantize(values[r], scale[r], x.dtype)[:, : x.shape[1]]) for r in _slices(values, size)]
        return torch.cat(parts, -1)

    def _has_kernel(self, x: torch.Tensor) -> bool:
        few = 0 < len(x) <= _KERNEL_ROWS[self.bits] and not x.requires_grad
        # For other sizes, PyTorch's 8-bit kernel reads beyond rows, and the 4-bit kernel refuses.
        fits = self.shape[-1] % 32 == 0 if self.bits == 8 else self.shape[-2] % 16 == 0
        exists = multiply_int8 if self.bits == 8 else multiply_int4
        return few and fits and exists is not None and x.device.type == "cpu" and x.dtype == torch.bfloat16


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight: `[..., in]` -> `[..., out]`.

    Args:
        weight: the weight.
        bias: `[out]`, or None.
    """

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.weight(x)
        return out if self.bias is None else out + self.bias


def round_to_int4(weight: torch.Tensor) -> torch.Tensor:
    """Rounds a weight `[rows, in]` to the values of a `QuantizedWeight` with 4 bits. The dtype does not change."""
    size = weight.numel() if torch.compiler.is_compiling() else _ROUNDED.get(weight.device.type, 1 << 26)
    parts = []
    for rows in _slices(weight, size):
        integers, scale = _groups(weight[rows], 4)
        parts.append((integers * scale).flatten(1)[:, : weight.shape[1]].to(weight.dtype))
    return torch.cat(parts)


def _quantize(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes `weight` `[rows, in]`. Returns `values` and `scale` as in `QuantizedWeight`."""
    if not torch.isfinite(weight).all():
        raise UserError("a weight is infinite or NaN, so the model cannot be quantized; use another checkpoint")
    integers, scale = _groups(weight, bits)
    integers, scale = integers.to(torch.int8), scale.squeeze(-1).to(torch.bfloat16)
    if bits == 8:
        return integers.squeeze(1), scale.squeeze(1)
    low, high = (integers + 8).view(torch.uint8).chunk(2, -1)
    return low | (high << 4), scale


def _groups(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes `weight` `[rows, in]` in groups of columns with a common scale.

    With 4 bits, each group gets the scale with the least squared error, of several scales that are tried.

    Returns:
        The integers `[rows, groups, columns]`, including padding columns, and scales `[rows, groups, 1]` with the
        precision of bfloat16. Both have at least float32.
    """
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    groups = wide.unsqueeze(1) if bits == 8 else F.pad(wide, (0, -wide.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    largest = torch.where(high > -low, high, low)
    scale = _rounded(largest / _DIVISORS[bits][0])
    least: torch.Tensor | None = None
    for divisor in _DIVISORS[bits] if bits == 4 else ():
        tried = _integers(groups, _rounded(largest / divisor), bits)
        # The best scale for these integers, by least squares.
        tried = _rounded((tried * groups).sum(-1, True) / tried.square_().sum(-1, True))
        error = (_integers(groups, tried, bits).mul_(tried)).sub_(groups).square_().sum(-1, True)
        scale = tried if least is None else torch.where(error < least, tried, scale)
        least = error if least is None else torch.minimum(error, least)
    return _integers(groups, scale, bits), scale


def _rounded(scale: torch.Tensor) -> torch.Tensor:
    """Rounds scales to bfloat16. Scales that are 0 or NaN become 1; groups of zeros have such scales."""
    scale = scale.to(torch.bfloat16).to(scale.dtype)
    return torch.where(torch.isfinite(scale) & (scale != 0), scale, 1.0)


def _integers(groups: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    return (groups / scale).round_().clamp_(low, high)


def _unpack(values: torch.Tensor) -> torch.Tensor:
    """Unpacks 4-bit values to int8 integers, including padding: `[..., groups, 16]` -> `[..., groups x 32]`."""
    return (torch.cat((values & 15, values >> 4), -1).view(torch.int8) - 8).flatten(-2)


def _dequantize(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns 4-bit weights in `dtype`, including padding columns, `[..., groups x 32]`."""
    scale = scale.unsqueeze(-1).to(torch.promote_types(dtype, torch.float32))  # faster than bfloat16
    halves = [half.to(scale.dtype).sub_(8).mul_(scale).to(dtype) for half in (values & 15, values >> 4)]
    return torch.cat(halves, -1).flatten(-2)


def _slices(rows: torch.Tensor, elements: int) -> Iterator[slice]:
    """Yields slices that divide `rows` into blocks of at most `elements` elements, but at least one row."""
    size = max(1, elements // max(1, rows[:1].numel()))
    return (slice(start, min(start + size, len(rows))) for start in range(0, len(rows), size))


def _refuse_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise UserError("a quantized model cannot be saved; save the model that was loaded without `quantize`")

"""Dequantizes quantized weights to bfloat16, slice by slice, while they are read.

Two formats are supported: MXFP4 (Open Compute Project, 2023), which gpt-oss uses, and FP8 with one scale per block of a
matrix, which DeepSeek-V3 uses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.huggingface.pickled import open_tensors
from weft.errors import UserError
from weft.families.config_json import quantization

DTYPE = torch.bfloat16
_BLOCK = 32  # number of values that share a scale in MXFP4
_BIAS = 127  # bias of MXFP4 scales, which are exponents of 2
# The 16 values of FP4: one sign bit, two exponent bits, one mantissa bit. The low half of a byte is its first value.
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4 = torch.cat((_FP4, -_FP4))
_PAIRS = torch.stack((_FP4.repeat(16), _FP4.repeat_interleave(16)), dim=1).to(DTYPE)  # [byte, 2]
_PAIRS = _PAIRS.view(torch.int32).flatten()  # a pair of values as one integer, for a single look-up
_SCALES = torch.tensor([2.0 ** (byte - _BIAS) for byte in range(256)]).to(DTYPE)


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor, which can be sliced like a tensor of an open file. Slices are dequantized.

    Attributes:
        values: file and name of the tensor of quantized values.
        scales: file and name of the tensor of scales, possibly in another file.
        shape: shape of the dequantized tensor: `[row, column]` for FP8 and `[expert, column, row]` for MXFP4, whose
            stored values are `[expert, row, block of columns, byte]`.
        block: number of rows and of columns that share a scale in FP8; None for MXFP4.
    """

    values: tuple[Path, str]
    scales: tuple[Path, str]
    shape: tuple[int, ...]
    block: tuple[int, int] | None

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        """Returns a slice of the tensor, dequantized to bfloat16. `place` has one slice per dimension."""
        bounds = [part.indices(length)[:2] for part, length in zip(place, self.shape, strict=True)]
        return self._mxfp4(bounds) if self.block is None else self._fp8(bounds, self.block)

    def _mxfp4(self, bounds: list[tuple[int, int]]) -> torch.Tensor:
        experts, (first, last), rows = bounds
        before = first // _BLOCK
        place = (slice(*experts), slice(*rows), slice(before, -(-last // _BLOCK)))
        blocks, scales = _read(self.values, place), _read(self.scales, place)
        values = _PAIRS.index_select(0, blocks.flatten().int()).view(DTYPE).view(*scales.shape, _BLOCK)
        values = values.mul_(_SCALES[scales.int()].unsqueeze(-1)).flatten(-2)  # exact: scales are powers of 2
        return values[..., first - before * _BLOCK : last - before * _BLOCK].transpose(1, 2)

    def _fp8(self, bounds: list[tuple[int, int]], block: tuple[int, int]) -> torch.Tensor:
        (top, bottom), (left, right) = bounds
        height, width = block
        up, before = top // height, left // width
        values = _read(self.values, (slice(top, bottom), slice(left, right)))
        scales = _read(self.scales, (slice(up, -(-bottom // height)), slice(before, -(-right // width)))).float()
        found = torch.empty(values.shape, dtype=DTYPE)
        for number, row in enumerate(scales, start=up):  # one row of blocks at a time, to avoid a full copy in float32
            band = slice(max(top, number * height) - top, min(bottom, (number + 1) * height) - top)
            factors = row.repeat_interleave(width)[left - before * width :][: right - left]
            found[band] = values[band].float() * factors
        return found

    # The interface of an open safetensors file that contains only this tensor.

    def get_tensor(self, name: str) -> torch.Tensor:
        return self[tuple(slice(None) for _ in self.shape)]

    def get_slice(self, name: str) -> Quantized:
        return self


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a Hugging Face folder.

    Attributes:
        dtype, shape: dtype and shape after dequantization.
        quantized: the quantized values and scales, if the tensor is quantized; otherwise None.
    """

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    quantized: Quantized | None = None


def _read(where: tuple[Path, str], place: tuple[slice, ...]) -> torch.Tensor:
    file, name = where
    with open_tensors(file) as found:
        return found.get_slice(name)[place]


def dequantized(path: Path, config: dict[str, Any], stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the stored tensors, with each pair of quantized values and scales replaced by one bfloat16 tensor.

    Args:
        path: the Hugging Face folder.
        config: content of its config.json.
        stored: name -> tensor, as read from the headers of the files.

    Raises:
        UserError: the shape of a tensor of scales does not match the quantized values.
    """
    method = quantization(config)
    if method is None:
        return stored
    endings = ("_blocks", "_scales") if method == "mxfp4" else ("", "_scale_inv")
    kind = torch.uint8 if method == "mxfp4" else torch.float8_e4m3fn
    block = None if method == "mxfp4" else tuple(config["quantization_config"]["weight_block_size"])
    found: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for name, values in stored.items():
        base = name.removesuffix(endings[0])
        scales_name = base + endings[1]
        scales = stored.get(scales_name)
        if values.dtype != kind or not name.endswith(endings[0]) or scales is None:
            continue
        shape, expected = _shapes(values.shape, block)
        if shape is None or scales.shape != expected or (scales.dtype == kind) != (method == "mxfp4"):
            what = f"{scales_name} has shape {list(scales.shape)}, which does not match {list(values.shape)} of {name}"
            raise UserError(f"{what}; download the model again", path)
        quantized = Quantized((path / values.file, name), (path / scales.file, scales_name), shape, block)
        found[base] = replace(values, dtype=DTYPE, shape=shape, quantized=quantized)
        used |= {name, scales_name}
    return {name: entry for name, entry in stored.items() if name not in used} | found


def _shapes(shape: tuple[int, ...], block: tuple[int, ...] | None) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Returns the shape of the dequantized tensor (None if `shape` is invalid) and the expected shape of the scales.

    Args:
        shape: shape of the tensor of quantized values.
        block: number of rows and of columns that share a scale in FP8; None for MXFP4.
    """
    if block is None:
        fits = len(shape) == 4 and 2 * shape[3] == _BLOCK
        return ((shape[0], shape[2] * _BLOCK, shape[1]) if fits else None), shape[:-1]
    if len(shape) != 2:
        return None, ()
    return shape, (-(-shape[0] // block[0]), -(-shape[1] // block[1]))

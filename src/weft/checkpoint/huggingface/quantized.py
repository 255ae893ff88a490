"""Weights published as numbers of few bits and the scales of their blocks, read as the bfloat16 that they stand for.

Two formats: MXFP4 (Open Compute Project, 2023), as gpt-oss has it, and FP8 with a scale for each rectangle of a matrix,
as DeepSeek-V3 has it. A rectangle of a tensor is read and worked out by itself; nothing else of the files is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.huggingface.pickled import opened as open_tensors
from weft.errors import UserError
from weft.families.config_json import quantization

DTYPE = torch.bfloat16
_SHARING = 32  # numbers that share a scale in MXFP4
_BIAS = 127  # of its scales, which are exponents of 2
# The sixteen numbers of 4 bits: a sign, two of exponent, one of mantissa. Of a byte's two the first is in the low half.
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4 = torch.cat((_FP4, -_FP4))
_PAIRS = torch.stack((_FP4.repeat(16), _FP4.repeat_interleave(16)), dim=1).to(DTYPE)  # [byte, 2]
_PAIRS = _PAIRS.view(torch.int32).flatten()  # a pair as one number: looked up in one go
_SCALES = torch.tensor([2.0 ** (byte - _BIAS) for byte in range(256)]).to(DTYPE)


@dataclass(frozen=True)
class Packed:
    """A tensor's numbers and their scales, which may lie in different files; used like an open file's slice.

    Attributes:
        numbers, scales: file and name.
        shape: of what they stand for: `[expert, column, row]` in MXFP4, whose files have `[expert, row, block of
            columns, byte]`; else `[row, column]`.
        block: rows and columns that share a scale; None: MXFP4.
    """

    numbers: tuple[Path, str]
    scales: tuple[Path, str]
    shape: tuple[int, ...]
    block: tuple[int, int] | None

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        """The rectangle at `place`, one slice a dimension, in bfloat16."""
        bounds = [cut.indices(length)[:2] for cut, length in zip(place, self.shape, strict=True)]
        return self._mxfp4(bounds) if self.block is None else self._fp8(bounds, self.block)

    def _mxfp4(self, bounds: list[tuple[int, int]]) -> torch.Tensor:
        experts, (first, last), rows = bounds
        before = first // _SHARING
        place = (slice(*experts), slice(*rows), slice(before, -(-last // _SHARING)))
        blocks, scales = _read(self.numbers, place), _read(self.scales, place)
        values = _PAIRS.index_select(0, blocks.flatten().int()).view(DTYPE).view(*scales.shape, _SHARING)
        values = values.mul_(_SCALES[scales.int()].unsqueeze(-1)).flatten(-2)  # exact: powers of 2
        return values[..., first - before * _SHARING : last - before * _SHARING].transpose(1, 2)

    def _fp8(self, bounds: list[tuple[int, int]], block: tuple[int, int]) -> torch.Tensor:
        (top, bottom), (left, right) = bounds
        height, width = block
        up, before = top // height, left // width
        numbers = _read(self.numbers, (slice(top, bottom), slice(left, right)))
        scales = _read(self.scales, (slice(up, -(-bottom // height)), slice(before, -(-right // width)))).float()
        found = torch.empty(numbers.shape, dtype=DTYPE)
        for number, row in enumerate(scales, start=up):  # a band of blocks at a time: no copy of all in float32
            band = slice(max(top, number * height) - top, min(bottom, (number + 1) * height) - top)
            factors = row.repeat_interleave(width)[left - before * width :][: right - left]
            found[band] = numbers[band].float() * factors
        return found

    # As an open file that holds this tensor and no other.

    def get_tensor(self, name: str) -> torch.Tensor:
        return self[tuple(slice(None) for _ in self.shape)]

    def get_slice(self, name: str) -> Packed:
        return self


@dataclass(frozen=True)
class Stored:
    """A tensor in a file of theirs; or, with `packed`, what a quantized one stands for."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    packed: Packed | None = None


def _read(where: tuple[Path, str], place: tuple[slice, ...]) -> torch.Tensor:
    file, name = where
    with open_tensors(file) as found:
        return found.get_slice(name)[place]


def unpacked(path: Path, config: dict[str, Any], stored: dict[str, Stored]) -> dict[str, Stored]:
    """A folder's tensors as what they stand for: one of bfloat16 in place of two, numbers and scales.

    Raises:
        UserError: scales that do not belong to their numbers.
    """
    method = quantization(config)
    if method is None:
        return stored
    endings = ("_blocks", "_scales") if method == "mxfp4" else ("", "_scale_inv")
    kind = torch.uint8 if method == "mxfp4" else torch.float8_e4m3fn
    block = None if method == "mxfp4" else tuple(config["quantization_config"]["weight_block_size"])
    found: dict[str, Stored] = {}
    taken: set[str] = set()
    for name, numbers in stored.items():
        base = name.removesuffix(endings[0])
        scales = stored.get(base + endings[1])
        if numbers.dtype != kind or not name.endswith(endings[0]) or scales is None:
            continue
        shape, expected = _shapes(numbers.shape, block)
        if shape is None or scales.shape != expected or (scales.dtype == kind) != (method == "mxfp4"):
            what = (
                f"{base + endings[1]} is {list(scales.shape)}, and {name}, whose scales it has, {list(numbers.shape)}"
            )
            raise UserError(f"{what}; download the model again", path)
        packed = Packed((path / numbers.file, name), (path / scales.file, base + endings[1]), shape, block)
        found[base] = replace(numbers, dtype=DTYPE, shape=shape, packed=packed)
        taken |= {name, base + endings[1]}
    return {name: entry for name, entry in stored.items() if name not in taken} | found


def _shapes(shape: tuple[int, ...], block: tuple[int, ...] | None) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """What numbers of this shape stand for (None: nothing), and their scales' shape."""
    if block is None:
        fits = len(shape) == 4 and 2 * shape[3] == _SHARING
        return ((shape[0], shape[2] * _SHARING, shape[1]) if fits else None), shape[:-1]
    if len(shape) != 2:
        return None, ()
    return shape, (-(-shape[0] // block[0]), -(-shape[1] // block[1]))

"""Rotary position embedding (Su et al., 2021), in the half-split layout of Llama's published weights."""

from __future__ import annotations

import math

import torch

from weft.config.model import RopeScaling


def rotary_cos_sin(
    positions: torch.Tensor,
    rotary_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RopeScaling | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotations of all positions, computed once a forward and handed to every block.

    Some scalings depend on how long a sequence is (`dynamic`, `longrope`): that is a row's largest position, plus 1.
    So a row gets what it would get alone, whatever rows are beside it. Of documents packed into one row, the longest
    decides for all of them; and keys in a cache stay rotated as they were when the row was shorter.

    Args:
        positions: `[batch, seq]`, or `[1, seq]` where all rows count alike. Whole rows, or their ends.
        rotary_dim: how many of each head's numbers are rotated; even.
        dtype: of the model's computing; the table has at least float32.
        lengths: `[batch]`, how long the rows are of which `positions` are a part; None: they are whole, or ends.

    Returns:
        cosines and sines, each `[batch, 1, seq, rotary_dim / 2]`.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=dtype) / rotary_dim
    frequencies, factor = 1.0 / theta**exponents, 1.0
    if scaling is not None and rotary_depends_on_length(scaling):
        lengths = positions.amax(-1) + 1 if lengths is None else lengths
        frequencies, factor = _BY_LENGTH[scaling.rope_type](exponents, theta, scaling, lengths.view(-1, 1, 1))
    elif scaling is not None:
        frequencies, factor = _SCALINGS[scaling.rope_type](frequencies, theta, scaling)
    angles = positions.to(dtype).unsqueeze(-1) * frequencies  # [batch, seq, rotary_dim / 2]
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rotate(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate each pair (i, i + rotary_dim / 2) of `x` `[batch, heads, seq, head_dim]` by its position's angle.

    A head's numbers from `rotary_dim` on stay as they are.
    """
    cos, sin = table
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary_dim], table), x[..., rotary_dim:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotary_depends_on_length(scaling: RopeScaling | None) -> bool:
    """Whether the rotations of a sequence's positions depend on how long it is."""
    return scaling is not None and scaling.rope_type in _BY_LENGTH


def rotary_changes_at(scaling: RopeScaling | None, length: int) -> bool:
    """Whether all positions are rotated in another way once a sequence has grown by a token to `length`.

    Then a cache's keys are to be made again: a model with longrope is trained with one set of rotations or the other,
    never with both in one sequence. `dynamic` changes a little with each token, and its keys stay as they are.
    """
    if scaling is None or scaling.rope_type != "longrope" or scaling.original_max_position_embeddings is None:
        return False
    return length == scaling.original_max_position_embeddings + 1


def _original(scaling: RopeScaling) -> int:
    """Positions before the stretching: the config has them of all that ask."""
    assert scaling.original_max_position_embeddings is not None
    return scaling.original_max_position_embeddings


def _linear(frequencies: torch.Tensor, theta: float, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """Positions interpolated (Chen et al., 2023)."""
    return frequencies / scaling.factor, 1.0


def _llama3(frequencies: torch.Tensor, theta: float, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """Slow rotations slowed, fast ones left alone, a ramp between (Dubey et al., 2024)."""
    turns = _original(scaling) * frequencies / (2 * math.pi)  # within the first context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies, 1.0


def _yarn(frequencies: torch.Tensor, theta: float, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """The ramp over the rotations' numbers, and a factor that sharpens attention (Peng et al., 2023)."""
    half = frequencies.shape[0]

    def index(turns: float) -> float:  # of the rotation that makes so many turns within the first context
        wavelength = _original(scaling) / (turns * 2 * math.pi)
        return half * math.log(wavelength) / math.log(theta)

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001
    places = torch.arange(half, device=frequencies.device, dtype=frequencies.dtype)
    slowed = ((places - low) / (high - low)).clamp(0, 1)
    mixed = frequencies / scaling.factor * slowed + frequencies * (1 - slowed)
    return mixed, _attention_factor(scaling)


def _attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    growth = math.log(scaling.factor) if scaling.factor > 1 else 0.0
    if scaling.mscale and scaling.mscale_all_dim:
        return (0.1 * scaling.mscale * growth + 1) / (0.1 * scaling.mscale_all_dim * growth + 1)
    return 0.1 * growth + 1


def _dynamic(
    exponents: torch.Tensor, theta: float, scaling: RopeScaling, lengths: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """A larger base for sequences beyond the first context, by their length (NTK-aware; Peng et al., 2023)."""
    original, rotary_dim = _original(scaling), 2 * exponents.shape[0]
    lengths = lengths.clamp(min=original).to(exponents.dtype)
    growth = scaling.factor * lengths / original - (scaling.factor - 1)
    base = theta * growth ** (rotary_dim / (rotary_dim - 2))
    return 1.0 / base**exponents, 1.0


def _longrope(
    exponents: torch.Tensor, theta: float, scaling: RopeScaling, lengths: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Each rotation slowed by a factor of its own: one set within the first context, one beyond (Ding et al., 2024)."""
    original = _original(scaling)
    short, long = (exponents.new_tensor(factors) for factors in (scaling.short_factor, scaling.long_factor))
    factors = torch.where(lengths > original, long, short)  # [batch, 1, rotary_dim / 2]
    sharpened = scaling.attention_factor
    if sharpened is None:
        sharpened = math.sqrt(1 + math.log(max(scaling.factor, 1.0)) / math.log(original))
    return 1.0 / (factors * theta**exponents), sharpened


_SCALINGS = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
_BY_LENGTH = {"dynamic": _dynamic, "longrope": _longrope}

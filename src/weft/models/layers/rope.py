"""The rotary embedding (RoPE; Su et al., 2021), in the half-split layout of Llama's weights."""

from __future__ import annotations

import math

import torch

from weft.config.model_sections import RopeScaling


def rotary_cos_sin(
    positions: torch.Tensor,
    rotary_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RopeScaling | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the cosines and sines of all positions, each `[batch, 1, seq, rotary_dim / 2]`.

    The decoder calls this function once per forward pass. The scalings `dynamic` and `longrope` depend on the length of
    each sequence: the largest position in the sequence plus 1, if `lengths` is None. Other sequences of the batch have
    no effect. If documents are packed into one sequence, the longest document determines the length. Cached keys keep
    the rotation that they got when the sequence was shorter.

    Args:
        positions: `[batch, seq]`, or `[1, seq]` if the positions are equal for all sequences. `seq` covers the full
            sequence or its last tokens.
        rotary_dim: number of dimensions of each head that are rotated; even.
        theta: base of the frequencies, `rope_theta`.
        dtype: dtype of the model's computation; the result is at least float32.
        scaling: RoPE scaling; None: no scaling.
        lengths: `[batch]`, lengths of the full sequences if `positions` are shards of sequences; or `[batch, seq]`, the
            length of each position's sequence.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=dtype) / rotary_dim
    frequencies, factor = 1.0 / theta**exponents, 1.0
    if scaling is not None and rotary_depends_on_length(scaling):
        lengths = positions.amax(-1) + 1 if lengths is None else lengths
        frequencies, factor = _BY_LENGTH[scaling.rope_type](
            exponents, theta, scaling, lengths.view(lengths.shape[0], -1, 1)
        )
    elif scaling is not None:
        frequencies, factor = _SCALINGS[scaling.rope_type](frequencies, theta, scaling)
    angles = positions.to(dtype).unsqueeze(-1) * frequencies  # [batch, seq, rotary_dim / 2]
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def apply_rotary(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates the pairs of dimensions (i, i + rotary_dim / 2) of `x` by the angles of their positions.

    Dimensions with an index of at least `rotary_dim` are unchanged.

    Args:
        x: `[batch, heads, seq, head_dim]`.
        table: the cosines and sines that `rotary_cos_sin` returned.
    """
    cos, sin = table
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((apply_rotary(x[..., :rotary_dim], table), x[..., rotary_dim:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotary_depends_on_length(scaling: RopeScaling | None) -> bool:
    """Whether the rotary embedding of a sequence depends on the sequence's length."""
    return scaling is not None and scaling.rope_type in _BY_LENGTH


def rotary_changes_at(scaling: RopeScaling | None, length: int) -> bool:
    """Whether the rotation of all positions changes when a sequence grows by one token to `length`.

    This happens with `longrope` beyond the original context length. Cached keys must then be recomputed, because the
    model is trained with one set of frequencies per sequence. `dynamic` changes slightly with each token; its cached
    keys are kept.
    """
    if scaling is None or scaling.rope_type != "longrope" or scaling.original_max_position_embeddings is None:
        return False
    return length == scaling.original_max_position_embeddings + 1


def _original(scaling: RopeScaling) -> int:
    """Returns the context length before scaling. The config sets this length for all scalings that need it."""
    assert scaling.original_max_position_embeddings is not None
    return scaling.original_max_position_embeddings


def _linear(frequencies: torch.Tensor, theta: float, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """Computes position interpolation (Chen et al., 2023): divides all frequencies by the scaling factor.

    Returns the scaled frequencies, and 1 as multiplier of the cosines and sines.
    """
    return frequencies / scaling.factor, 1.0


def _llama3(frequencies: torch.Tensor, theta: float, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """Divides low frequencies by the scaling factor and keeps high frequencies.

    Frequencies between low and high ones are divided by a smaller factor. This is the scaling of Llama 3.1 (Dubey et
    al., 2024). Returns the scaled frequencies, and 1 as multiplier of the cosines and sines.
    """
    rotations = _original(scaling) * frequencies / (2 * math.pi)  # number of rotations within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies, 1.0


def _yarn(frequencies: torch.Tensor, theta: float, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """Computes YaRN (Peng et al., 2023): divides low frequencies by the scaling factor, and scales attention scores.

    Returns the scaled frequencies and a multiplier of the cosines and sines, which scales the attention scores.
    """
    half = frequencies.shape[0]

    def index(rotations: float) -> float:  # index of the frequency that rotates this often
        wavelength = _original(scaling) / (rotations * 2 * math.pi)
        return half * math.log(wavelength) / math.log(theta)

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001
    indices = torch.arange(half, device=frequencies.device, dtype=frequencies.dtype)
    scaled = ((indices - low) / (high - low)).clamp(0, 1)
    mixed = frequencies / scaling.factor * scaled + frequencies * (1 - scaled)
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
    """Computes NTK-aware scaling (Peng et al., 2023): the base grows with lengths beyond the original context.

    Returns the frequencies 1 / base^exponents, and 1 as multiplier of the cosines and sines.
    """
    original, rotary_dim = _original(scaling), 2 * exponents.shape[0]
    lengths = lengths.clamp(min=original).to(exponents.dtype)
    growth = scaling.factor * lengths / original - (scaling.factor - 1)
    base = theta * growth ** (rotary_dim / (rotary_dim - 2))
    return 1.0 / base**exponents, 1.0


def _longrope(
    exponents: torch.Tensor, theta: float, scaling: RopeScaling, lengths: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Computes LongRoPE (Ding et al., 2024): divides each frequency by its short or its long factor.

    The long factors apply to sequences that are longer than the original context. The frequencies before scaling are
    1 / theta^exponents. Returns the scaled frequencies and a multiplier of the cosines and sines.
    """
    original = _original(scaling)
    short, long = (exponents.new_tensor(factors) for factors in (scaling.short_factor, scaling.long_factor))
    factors = torch.where(lengths > original, long, short)  # [batch, 1, rotary_dim / 2]
    attention_factor = scaling.attention_factor
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(max(scaling.factor, 1.0)) / math.log(original))
    return 1.0 / (factors * theta**exponents), attention_factor


_SCALINGS = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
_BY_LENGTH = {"dynamic": _dynamic, "longrope": _longrope}

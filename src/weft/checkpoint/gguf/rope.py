"""Converts the scaling of rotary embeddings to GGUF's metadata and factors of frequencies, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from weft.config.model import ModelSection
from weft.config.model_sections import RopeScaling
from weft.errors import UserError
from weft.models.layers.rope import rotary_cos_sin

FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_TYPE, FACTOR, _ORIGINAL = "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"
ATTENTION = "rope.scaling.attn_factor"
_BETAS = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
SCALING_NUMBERS = (FACTOR, _ORIGINAL, ATTENTION, *_BETAS.values())
# Llama 3.1's constants, by which the scaling is recognized in factors.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_metadata(section: ModelSection) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns metadata, without the architecture's name, and tensors with factors of the frequencies.

    Raises:
        UserError: llama.cpp has no such scaling.
    """
    scaling = section.rope_scaling
    if scaling is None:
        return {}, {}
    kind, original = scaling.rope_type, scaling.original_max_position_embeddings
    if kind == "linear":
        return {_TYPE: "linear", FACTOR: float(scaling.factor)}, {}
    if kind == "llama3":
        return {}, {FREQS: _llama3_factors(section, scaling)}
    if kind == "longrope":
        factor = scaling.attention_factor
        if factor is None:
            factor = math.sqrt(1 + math.log(max(scaling.factor, 1.0)) / math.log(original or 2))
        tensors = {LONG: torch.tensor(scaling.long_factor), SHORT: torch.tensor(scaling.short_factor)}
        return {_TYPE: "longrope", _ORIGINAL: original, ATTENTION: factor}, tensors
    if kind != "yarn" or not scaling.truncate:
        what = "rope_type" if kind != "yarn" else "truncate"
        raise UserError(
            f"model.rope_scaling.{what} is {getattr(scaling, what)!r}, which llama.cpp does not compute; use --to hf"
        )
    # llama.cpp multiplies queries and keys by 1 + log(factor) / 10 and by this key.
    growth = 1 + 0.1 * math.log(max(scaling.factor, 1.0))
    betas = {key: getattr(scaling, name) for name, key in _BETAS.items()}
    attention = attention_factor(section) / growth
    return {_TYPE: "yarn", FACTOR: float(scaling.factor), _ORIGINAL: original, ATTENTION: attention, **betas}, {}


def attention_factor(section: ModelSection) -> float:
    """Returns the factor by which rotated queries and keys are multiplied: the cosine at position 0."""
    cos, _ = rotary_cos_sin(
        torch.zeros(1, 1), section.rotary_dim, section.rope_theta, torch.float64, section.rope_scaling
    )
    return cos[0, 0, 0, 0].item()


def _llama3_factors(section: ModelSection, scaling: RopeScaling) -> torch.Tensor:
    """Returns the numbers by which the scaling "llama3" divides the frequencies, `[rotary_dim / 2]`."""
    angles = []
    for one in (None, scaling):
        cos, sin = rotary_cos_sin(torch.ones(1, 1), section.rotary_dim, section.rope_theta, torch.float64, one)
        angles.append(torch.atan2(sin, cos)[0, 0, 0])  # the frequencies, which are at most 1
    return (angles[0] / angles[1]).float()


def read_rope_scaling(
    metadata: Mapping[str, Any], factors: Mapping[str, torch.Tensor], section: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns `rope_scaling` for metadata and tensors of a GGUF file; None: no scaling.

    Factors of Llama 3.1 become the scaling "llama3". Other factors become the scaling "longrope" with equal factors for
    short and long sequences.

    Args:
        metadata: metadata, without the architecture's name.
        factors: the tensors `FREQS`, `LONG` and `SHORT` that the file has.
        section: the other keys of `model:`.
    """
    context = section["max_position_embeddings"]
    if FREQS in factors:
        return _scaling_of_factors(factors[FREQS], section)
    kind, factor = metadata.get(_TYPE, "linear"), metadata.get(FACTOR, 1.0)
    original = metadata.get(_ORIGINAL, context)
    if LONG in factors and SHORT in factors:
        lists = {"short_factor": factors[SHORT].tolist(), "long_factor": factors[LONG].tolist()}
        lengths = {"factor": max(1.0, context / original), "original_max_position_embeddings": original}
        return {"rope_type": "longrope", **lists, **lengths, "attention_factor": metadata.get(ATTENTION, 1.0)}
    if kind == "yarn":
        betas = {name: metadata[key] for name, key in _BETAS.items() if key in metadata}
        attention = metadata.get(ATTENTION, 1.0) * (1 + 0.1 * math.log(max(factor, 1.0)))
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        return {**scaling, **betas, "attention_factor": attention}
    return None if kind == "none" or factor in (0.0, 1.0) else {"rope_type": "linear", "factor": factor}


def _scaling_of_factors(factors: torch.Tensor, section: Mapping[str, Any]) -> dict[str, Any]:
    llama3 = {"rope_type": "llama3", "factor": factors.max().item(), **_LLAMA3}
    expected = _llama3_factors(ModelSection(**section), RopeScaling(**llama3))
    if expected.shape == factors.shape and torch.allclose(expected, factors, rtol=1e-5):
        return llama3
    lists = {"short_factor": factors.tolist(), "long_factor": factors.tolist()}
    lengths = {"factor": 1.0, "original_max_position_embeddings": section["max_position_embeddings"]}
    return {"rope_type": "longrope", **lists, **lengths, "attention_factor": 1.0}

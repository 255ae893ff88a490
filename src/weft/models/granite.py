"""Granite 3 (IBM, 2024): Llama with multipliers in place of the usual scales."""

from __future__ import annotations

from typing import Any

from weft.config.model import ModelSection
from weft.models import llama
from weft.models.mapping import read, read_rope, same, write, write_rope

ARCHITECTURES = ("GraniteForCausalLM",)
MODEL_TYPE = "granite"
_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
KEYS = same("head_dim", "hidden_act", "attention_bias", "mlp_bias", *_MULTIPLIERS)
DEFAULTS = llama.DEFAULTS | dict.fromkeys(_MULTIPLIERS, 1.0)
WEIGHTS = llama.WEIGHTS


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `ModelSection` for a config.json. Raises UserError for what is not supported."""
    return {"family": "granite", **read(config, KEYS, DEFAULTS), **read_rope(config)}


def to_hf(section: ModelSection) -> dict[str, Any]:
    """The keys of the config.json that transformers loads."""
    return write(section, KEYS) | write_rope(section)

"""Granite 3 (IBM, 2024): Llama with multipliers in place of the usual scales."""

from __future__ import annotations

from typing import Any

from weft.config.model import ModelSection
from weft.models import llama
from weft.models.mapping import read, same, write
from weft.models.rotations import read_rope, write_rope

ARCHITECTURES = ("GraniteForCausalLM",)
MODEL_TYPE = "granite"
_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
KEYS = same("head_dim", "hidden_act", "attention_bias", "mlp_bias", *_MULTIPLIERS)
DEFAULTS = llama.DEFAULTS | dict.fromkeys(_MULTIPLIERS, 1.0)
WEIGHTS = llama.WEIGHTS


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `ModelSection` for a config.json. Raises UserError for what is not supported."""
    return {"family": "granite", **read(config, KEYS, DEFAULTS), **read_rope(config, DEFAULTS)}


def to_hf(section: ModelSection) -> dict[str, Any]:
    """The keys of the config.json that transformers loads."""
    return write(section, KEYS) | write_rope(section)


PRESETS = {
    # Granite 3.0 2B and 8B: 2.53B and 8.17B.
    "granite3.0-2b": {
        "family": "granite",
        "vocab_size": 49155,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "tie_word_embeddings": True,
    },
    "granite3.0-8b": {
        "preset": "granite3.0-2b",
        "hidden_size": 4096,
        "intermediate_size": 12800,
        "attention_multiplier": 0.0078125,
        "logits_scaling": 16.0,
    },
}

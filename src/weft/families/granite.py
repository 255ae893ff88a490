"""Granite 3 (IBM, 2024): Llama with multipliers of embeddings, attention, residuals and logits."""

from __future__ import annotations

from weft.families import llama
from weft.families.mapping import renaming, same, size

ARCHITECTURES = ("GraniteForCausalLM",)
CLASSIFIER = None
MODEL_TYPE = "granite"
_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
KEYS = same("head_dim", "hidden_act", "attention_bias", "mlp_bias", *_MULTIPLIERS)
DEFAULTS = llama.DEFAULTS | dict.fromkeys(_MULTIPLIERS, 1.0)
WEIGHTS = llama.WEIGHTS
from_hf, to_hf = renaming({"family": "granite"}, KEYS, DEFAULTS)

_PRESET = {
    "family": "granite", "vocab_size": 49155, "max_position_embeddings": 4096, "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22, "tie_word_embeddings": True,
}  # fmt: skip
PRESETS = {  # Granite 3.0 2B and 8B: 2.53B and 8.17B parameters
    "granite3.0-2b": _PRESET | size(2048, 40, 32, 8, 8192, attention_multiplier=2**-6, logits_scaling=8.0),
    "granite3.0-8b": _PRESET | size(4096, 40, 32, 8, 12800, attention_multiplier=2**-7, logits_scaling=16.0),
}

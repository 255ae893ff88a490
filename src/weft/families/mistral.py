"""Mistral (Jiang et al., 2023): Llama with a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from weft.families import llama
from weft.families.mapping import refuse, renaming, same, size

ARCHITECTURES = ("MistralForCausalLM",)
MODEL_TYPE = "mistral"
KEYS = same("head_dim", "hidden_act", "sliding_window")
DEFAULTS = llama.DEFAULTS | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
WEIGHTS = llama.WEIGHTS
_from_hf, to_hf = renaming({"family": "mistral"}, KEYS, DEFAULTS)


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    keys = _from_hf(config)
    if config.get("layer_types") is not None:  # Transformers' Mistral ignores layer_types
        kind = "sliding_attention" if "sliding_window" in keys else "full_attention"
        refuse(config, layer_types=[kind] * keys["num_hidden_layers"])
    return keys


_PRESET = {"family": "mistral", "max_position_embeddings": 32768}
PRESETS = {
    # Mistral 7B, the first version: 7.24B parameters.
    "mistral-7b": _PRESET | size(4096, 32, 32, 8, 14336, vocab_size=32000, sliding_window=4096),
    # Mistral 7B, the third version, without a sliding window: 7.25B parameters.
    "mistral-7b-v0.3": _PRESET | size(4096, 32, 32, 8, 14336, vocab_size=32768, rope_theta=1000000.0),
}

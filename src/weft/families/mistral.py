"""Mistral (Jiang et al., 2023): Llama with a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from weft.families import llama
from weft.families.mapping import read, refuse, same, size, write
from weft.families.rope_keys import read_rope, write_rope

ARCHITECTURES = ("MistralForCausalLM",)
MODEL_TYPE = "mistral"
KEYS = same("head_dim", "hidden_act", "sliding_window")
DEFAULTS = llama.DEFAULTS | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
WEIGHTS = llama.WEIGHTS


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `model:` for a config.json. Raises UserError for what is not supported."""
    keys = read(config, KEYS, DEFAULTS)
    if config.get("layer_types") is not None:  # transformers' Mistral does not look at them
        kind = "sliding_attention" if "sliding_window" in keys else "full_attention"
        refuse(config, layer_types=[kind] * keys["num_hidden_layers"])
    return {"family": "mistral", **keys, **read_rope(config, DEFAULTS)}


def to_hf(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of the config.json that transformers loads."""
    return write(keys, KEYS) | write_rope(keys)


_PRESET = {"family": "mistral", "max_position_embeddings": 32768}
PRESETS = {
    # Mistral 7B, its first version: 7.24B parameters.
    "mistral-7b": _PRESET | size(4096, 32, 32, 8, 14336, vocab_size=32000, sliding_window=4096),
    # Its third version, without the window: 7.25B.
    "mistral-7b-v0.3": _PRESET | size(4096, 32, 32, 8, 14336, vocab_size=32768, rope_theta=1000000.0),
}

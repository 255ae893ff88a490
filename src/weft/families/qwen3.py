"""Qwen 3 (Yang et al., 2025), dense: Llama with queries and keys normalized, and a head size of its own."""

from __future__ import annotations

from typing import Any

from weft.families import llama
from weft.families.mapping import Weight, read, same, size, write
from weft.families.qwen2 import read_windows, write_windows
from weft.families.rope_keys import read_rope, write_rope

ARCHITECTURES = ("Qwen3ForCausalLM",)
MODEL_TYPE = "qwen3"
KEYS = same("head_dim", "hidden_act", "attention_bias")
DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 151936, "num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128,
}  # fmt: skip
WEIGHTS = (
    *llama.WEIGHTS,
    Weight("layers.{n}.attention.q_norm", "model.layers.{n}.self_attn.q_norm"),
    Weight("layers.{n}.attention.k_norm", "model.layers.{n}.self_attn.k_norm"),
)


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `model:` for a config.json. Raises UserError for what is not supported."""
    keys = read(config, KEYS, DEFAULTS)
    windows = read_windows(config, keys["num_hidden_layers"])
    return {"family": "qwen3", "qk_norm": True, **keys, **read_rope(config, DEFAULTS), **windows}


def to_hf(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of the config.json that transformers loads."""
    return write(keys, KEYS) | write_rope(keys) | write_windows(keys)


_PRESET = {
    "family": "qwen3", "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960,
    "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "qk_norm": True,
}  # fmt: skip
PRESETS = {  # Qwen3 0.6B and 8B: 596M and 8.19B parameters
    "qwen3-0.6b": _PRESET | size(1024, 28, 16, 8, 3072, tie_word_embeddings=True),
    "qwen3-1.7b": _PRESET | size(2048, 28, 16, 8, 6144, tie_word_embeddings=True),
    "qwen3-4b": _PRESET | size(2560, 36, 32, 8, 9728, tie_word_embeddings=True),
    "qwen3-8b": _PRESET | size(4096, 36, 32, 8, 12288),
    "qwen3-14b": _PRESET | size(5120, 40, 40, 8, 17408),
    "qwen3-32b": _PRESET | size(5120, 64, 64, 8, 25600),
}

"""Qwen 3 (Yang et al., 2025), dense: Llama with queries and keys normalized, and a head size of its own."""

from __future__ import annotations

from typing import Any

from weft.config.model import ModelSection
from weft.models import llama
from weft.models.mapping import Weight, read, same, write
from weft.models.qwen2 import read_windows, write_windows
from weft.models.rotations import read_rope, write_rope

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
    """The keys of `ModelSection` for a config.json. Raises UserError for what is not supported."""
    keys = read(config, KEYS, DEFAULTS)
    windows = read_windows(config, keys["num_hidden_layers"])
    return {"family": "qwen3", "qk_norm": True, **keys, **read_rope(config, DEFAULTS), **windows}


def to_hf(section: ModelSection) -> dict[str, Any]:
    """The keys of the config.json that transformers loads."""
    return write(section, KEYS) | write_rope(section) | write_windows(section)


PRESETS = {
    # Qwen3 0.6B and 8B: 596M and 8.19B parameters.
    "qwen3-0.6b": {
        "family": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "qk_norm": True,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": {"preset": "qwen3-0.6b", "hidden_size": 2048, "intermediate_size": 6144},
    "qwen3-4b": {
        "preset": "qwen3-0.6b",
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 9728,
    },
    "qwen3-8b": {
        "family": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "qk_norm": True,
    },
    "qwen3-14b": {
        "preset": "qwen3-8b",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "intermediate_size": 17408,
    },
    "qwen3-32b": {
        "preset": "qwen3-8b",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "intermediate_size": 25600,
    },
}

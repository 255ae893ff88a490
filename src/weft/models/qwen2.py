"""Qwen 2 and 2.5 (Yang et al., 2024): Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from weft.config.model import ModelSection
from weft.models import llama
from weft.models.mapping import read, read_layer_types, read_window, same, write, write_layer_types
from weft.models.reading import flag, whole
from weft.models.rotations import read_rope, write_rope

ARCHITECTURES = ("Qwen2ForCausalLM",)
MODEL_TYPE = "qwen2"
KEYS = same("head_dim", "hidden_act")
DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 151936, "num_key_value_heads": 32, "max_position_embeddings": 32768,
}  # fmt: skip
WEIGHTS = llama.WEIGHTS


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `ModelSection` for a config.json. Raises UserError for what is not supported."""
    bias = {"attention_bias": True, "attention_output_bias": False}
    keys = read(config, KEYS, DEFAULTS)
    windows = read_windows(config, keys["num_hidden_layers"])
    return {"family": "qwen2", **bias, **keys, **read_rope(config, DEFAULTS), **windows}


def to_hf(section: ModelSection) -> dict[str, Any]:
    """The keys of the config.json that transformers loads."""
    return write(section, KEYS) | write_rope(section) | write_windows(section)


def read_windows(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The window's keys: it is off unless `use_sliding_window`, and then all layers from a certain one on have it."""
    window, first = read_window(config, 4096), whole(config, "max_window_layers", 28, least=0)
    if not flag(config, "use_sliding_window", False):
        window = None
    return read_layer_types(config, window, [window is not None and layer >= first for layer in range(layers)])


def write_windows(section: ModelSection) -> dict[str, Any]:
    """The same back, in the older keys too."""
    written = write_layer_types(section)
    types = [*written["layer_types"], "sliding_attention"]
    return written | {
        "use_sliding_window": written["sliding_window"] is not None,
        "max_window_layers": types.index("sliding_attention"),
    }


PRESETS = {
    # Qwen2.5 0.5B and 7B: 494M and 7.6B parameters.
    "qwen2.5-0.5b": {
        "family": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "attention_bias": True,
        "attention_output_bias": False,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "preset": "qwen2.5-0.5b",
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "intermediate_size": 8960,
        "max_position_embeddings": 131072,
    },
    "qwen2.5-3b": {
        "preset": "qwen2.5-0.5b",
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "intermediate_size": 11008,
    },
    "qwen2.5-7b": {
        "family": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "attention_bias": True,
        "attention_output_bias": False,
    },
}

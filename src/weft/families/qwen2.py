"""Qwen 2 and 2.5 (Yang et al., 2024): Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from weft.families import llama
from weft.families.json_values import flag, whole
from weft.families.mapping import read, read_layer_types, read_window, same, size, write, write_layer_types
from weft.families.rope_keys import read_rope, write_rope

ARCHITECTURES = ("Qwen2ForCausalLM",)
MODEL_TYPE = "qwen2"
KEYS = same("head_dim", "hidden_act")
DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 151936, "num_key_value_heads": 32, "max_position_embeddings": 32768,
}  # fmt: skip
WEIGHTS = llama.WEIGHTS
_ALWAYS = {"family": "qwen2", "attention_bias": True, "attention_output_bias": False}


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `model:` for a config.json. Raises UserError for what is not supported."""
    keys = read(config, KEYS, DEFAULTS)
    windows = read_windows(config, keys["num_hidden_layers"])
    return {**_ALWAYS, **keys, **read_rope(config, DEFAULTS), **windows}


def to_hf(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of the config.json that transformers loads."""
    return write(keys, KEYS) | write_rope(keys) | write_windows(keys)


def read_windows(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The window's keys: it is off unless `use_sliding_window`, and then all layers from a certain one on have it."""
    window, first = read_window(config, 4096), whole(config, "max_window_layers", 28, least=0)
    if not flag(config, "use_sliding_window", False):
        window = None
    return read_layer_types(config, window, [window is not None and layer >= first for layer in range(layers)])


def write_windows(keys: dict[str, Any]) -> dict[str, Any]:
    """The same back, in the older keys too."""
    written = write_layer_types(keys)
    types = [*written["layer_types"], "sliding_attention"]
    return written | {
        "use_sliding_window": written["sliding_window"] is not None,
        "max_window_layers": types.index("sliding_attention"),
    }


_PRESET = _ALWAYS | {"rope_theta": 1000000.0, "rms_norm_eps": 1e-6}
_TIED = _PRESET | {"vocab_size": 151936, "tie_word_embeddings": True}
PRESETS = {  # Qwen2.5 0.5B and 7B: 494M and 7.6B parameters
    "qwen2.5-0.5b": _TIED | size(896, 24, 14, 2, 4864, max_position_embeddings=32768),
    "qwen2.5-1.5b": _TIED | size(1536, 28, 12, 2, 8960, max_position_embeddings=131072),
    "qwen2.5-3b": _TIED | size(2048, 36, 16, 2, 11008, max_position_embeddings=32768),
    "qwen2.5-7b": _PRESET | size(3584, 28, 28, 4, 18944, max_position_embeddings=131072, vocab_size=152064),
}

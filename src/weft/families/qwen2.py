"""Qwen 2 and 2.5 (Yang et al., 2024): Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from weft.families import llama
from weft.families.json_values import flag, integer
from weft.families.mapping import read_layer_types, read_window, renaming, same, size, write_layer_types

ARCHITECTURES = ("Qwen2ForCausalLM",)
MODEL_TYPE = "qwen2"
KEYS = same("head_dim", "hidden_act")
DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 151936, "num_key_value_heads": 32, "max_position_embeddings": 32768,
}  # fmt: skip
WEIGHTS = llama.WEIGHTS
_ALWAYS = {"family": "qwen2", "attention_bias": True, "attention_output_bias": False}


def read_windows(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Returns the keys of `model:` for the sliding window of a config.json.

    No layer has a window unless `use_sliding_window` is true. If config.json has no `layer_types`, only the layers with
    an index of at least `max_window_layers` have a window.

    Args:
        config: a config.json.
        layers: number of layers.
    """
    window, first = read_window(config, 4096), integer(config, "max_window_layers", 28, least=0)
    if not flag(config, "use_sliding_window", False):
        window = None
    return read_layer_types(config, window, [window is not None and layer >= first for layer in range(layers)])


def write_windows(keys: dict[str, Any]) -> dict[str, Any]:
    """Converts the keys of `model:` for the sliding window to keys of config.json, including Qwen 2's older keys."""
    written = write_layer_types(keys)
    types = [*written["layer_types"], "sliding_attention"]
    return written | {
        "use_sliding_window": written["sliding_window"] is not None,
        "max_window_layers": types.index("sliding_attention"),
    }


WINDOWS = (read_windows, write_windows)
from_hf, to_hf = renaming(_ALWAYS, KEYS, DEFAULTS, WINDOWS)

_PRESET = _ALWAYS | {"rope_theta": 1000000.0, "rms_norm_eps": 1e-6}
_TIED = _PRESET | {"vocab_size": 151936, "tie_word_embeddings": True}
PRESETS = {  # Qwen2.5 0.5B and 7B: 494M and 7.6B parameters
    "qwen2.5-0.5b": _TIED | size(896, 24, 14, 2, 4864, max_position_embeddings=32768),
    "qwen2.5-1.5b": _TIED | size(1536, 28, 12, 2, 8960, max_position_embeddings=131072),
    "qwen2.5-3b": _TIED | size(2048, 36, 16, 2, 11008, max_position_embeddings=32768),
    "qwen2.5-7b": _PRESET | size(3584, 28, 28, 4, 18944, max_position_embeddings=131072, vocab_size=152064),
}

"""SmolLM3 (Bakouch et al., 2025): Llama without rotary embedding in every fourth layer."""

from __future__ import annotations

import reprlib
from typing import Any

from weft.errors import UserError
from weft.families import llama
from weft.families.json_values import flag, integer
from weft.families.mapping import read, read_layer_types, read_window, same, size, write, write_layer_types
from weft.families.rope_keys import read_rope, write_rope

ARCHITECTURES = ("SmolLM3ForCausalLM",)
MODEL_TYPE = "smollm3"
KEYS = same("head_dim", "hidden_act", "attention_bias", "mlp_bias")
DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 128256, "num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    "rope_theta": 2000000.0, "pad_token_id": 128004,
}  # fmt: skip
WEIGHTS = llama.WEIGHTS


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    keys = {**read(config, KEYS, DEFAULTS), **read_rope(config, DEFAULTS)}
    layers, interval = keys["num_hidden_layers"], integer(config, "no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers")
    if rotated is None:
        rotated = [int((layer + 1) % interval != 0) for layer in range(layers)]
    elif not isinstance(rotated, list):
        raise UserError(f"no_rope_layers: must be a list of 0 and 1, not {reprlib.repr(rotated)}")
    elif len(rotated) < layers:
        raise UserError(f"no_rope_layers: {len(rotated)} entries for {layers} layers; give one per layer")
    rotated = rotated[:layers]
    window = read_window(config, None)
    if not flag(config, "use_sliding_window", False):
        window = None
    windows = read_layer_types(config, window, [window is not None and not one for one in rotated])
    return {"family": "smollm3", "no_rope_layers": rotated, **keys, **windows}


def to_hf(keys: dict[str, Any]) -> dict[str, Any]:
    written = write(keys, KEYS) | write_rope(keys) | write_layer_types(keys)
    slides = written["sliding_window"] is not None
    return written | {"no_rope_layers": keys["no_rope_layers"], "use_sliding_window": slides}


PRESETS = {
    # 3.08B parameters.
    "smollm3-3b": {
        "family": "smollm3", "vocab_size": 128256, **size(2048, 36, 16, 4, 11008), "max_position_embeddings": 65536,
        "rope_theta": 5000000.0, "rms_norm_eps": 1e-6, "no_rope_layer_interval": 4, "tie_word_embeddings": True,
    },
}  # fmt: skip

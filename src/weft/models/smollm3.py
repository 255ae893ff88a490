"""SmolLM3 (Bakouch et al., 2025): Llama with every fourth layer without positions."""

from __future__ import annotations

from typing import Any

from weft.config.errors import UserError
from weft.config.model import ModelSection
from weft.models import llama
from weft.models.mapping import read, read_layer_types, read_window, same, write, write_layer_types
from weft.models.reading import field, flag, whole
from weft.models.rotations import read_rope, write_rope

ARCHITECTURES = ("SmolLM3ForCausalLM",)
MODEL_TYPE = "smollm3"
KEYS = same("head_dim", "hidden_act", "attention_bias", "mlp_bias")
DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 128256, "num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    "rope_theta": 2000000.0,
}  # fmt: skip
WEIGHTS = llama.WEIGHTS


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `ModelSection` for a config.json. Raises UserError for what is not supported."""
    read_keys = {**read(config, KEYS, DEFAULTS), **read_rope(config, DEFAULTS)}
    layers, interval = read_keys["num_hidden_layers"], whole(config, "no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers")
    if rotated is None:
        rotated = [int((layer + 1) % interval != 0) for layer in range(layers)]
    elif len(field("no_rope_layers", rotated, "no_rope_layers")) < layers:
        raise UserError(f"no_rope_layers: {len(rotated)} entries for {layers} layers; it must have one each")
    rotated = rotated[:layers]
    window = read_window(config, None)
    if not flag(config, "use_sliding_window", False):
        window = None
    windows = read_layer_types(config, window, [window is not None and not one for one in rotated])
    return {"family": "smollm3", "no_rope_layers": rotated, **read_keys, **windows}


def to_hf(section: ModelSection) -> dict[str, Any]:
    """The keys of the config.json that transformers loads."""
    written = write(section, KEYS)
    written |= write_rope(section) | write_layer_types(section)
    rotated = [int(section.rotates(layer)) for layer in range(section.num_hidden_layers)]
    return written | {"no_rope_layers": rotated, "use_sliding_window": written["sliding_window"] is not None}


PRESETS = {
    # 3.08B parameters.
    "smollm3-3b": {
        "family": "smollm3",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 11008,
        "max_position_embeddings": 65536,
        "rope_theta": 5000000.0,
        "rms_norm_eps": 1e-6,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
}

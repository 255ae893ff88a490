"""Gemma 3's text model (Gemma team, 2025): a sliding window in five of six layers, norms of queries and keys."""

from __future__ import annotations

from typing import Any

from weft.errors import UserError
from weft.families import gemma2, llama
from weft.families.json_values import integer, mapping, number
from weft.families.mapping import read, read_layer_types, read_window, size, write, write_layer_types
from weft.families.rope_keys import read_rope, rope_type, write_rope

ARCHITECTURES = ("Gemma3ForCausalLM",)
CLASSIFIER = "Gemma3TextForSequenceClassification"
MODEL_TYPE = "gemma3_text"
# Transformers' Gemma 3 ignores `attn_logit_softcapping`.
KEYS = {key: hf_key for key, hf_key in gemma2.KEYS.items() if key != "attn_logit_softcapping"}
DEFAULTS = gemma2.DEFAULTS | {
    "vocab_size": 262208, "max_position_embeddings": 131072, "final_logit_softcapping": None,
    "rope_theta": 1000000.0,
}  # fmt: skip
WEIGHTS = (*gemma2.WEIGHTS, *llama.QK_NORMS)


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    keys = {"qk_norm": True, **read(config, KEYS, DEFAULTS)}
    pattern = integer(config, "sliding_window_pattern", 6)
    slides = [(layer + 1) % pattern != 0 for layer in range(keys["num_hidden_layers"])]
    windows = read_layer_types(config, read_window(config, 4096), slides)
    rope, local = _read_rope(config)
    if windows:
        windows["rope_local_base_freq"] = local
    return {"family": "gemma3", **gemma2.always(config, keys["hidden_size"]), **keys, **rope, **windows}


def _read_rope(config: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Returns the keys of `model:` for the rotary embedding, and the value of `rope_local_base_freq`.

    As in Transformers 5, the older key `rope_scaling` overrides the values of layers with full attention.
    """
    given = mapping(config, "rope_parameters")
    if unknown := sorted(set(given) - {"full_attention", "sliding_attention"}):
        hint = "give a mapping for full_attention and one for sliding_attention"
        raise UserError(f"rope_parameters: unknown key {unknown[0]!r} for Gemma 3; {hint}")
    full = mapping(given, "full_attention") | mapping(config, "rope_scaling")
    keys = read_rope(config | {"rope_parameters": full, "rope_scaling": None}, DEFAULTS)
    local = mapping(given, "sliding_attention")
    if rope_type(local) != "default":
        raise UserError("rope_parameters: scaling is not supported for sliding_attention; use rope_type default")
    key, holder = ("rope_theta", local) if "rope_theta" in local else ("rope_local_base_freq", config)
    return keys, float(number(holder, key, 10000.0))


def to_hf(keys: dict[str, Any]) -> dict[str, Any]:
    written = write(keys, KEYS)
    rope = write_rope(keys)
    local = keys["rope_local_base_freq"] or keys["rope_theta"]
    rope["rope_local_base_freq"] = local
    rope["rope_parameters"] = {
        "full_attention": rope["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    return written | rope | write_layer_types(keys) | {"query_pre_attn_scalar": gemma2.scalar(keys)}


_PRESET = {
    "family": "gemma3", "vocab_size": 262208, "head_dim": 256, "max_position_embeddings": 131072,
    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window": 1024, "sliding_window_pattern": 6,
    "norm": "rmsnorm1p", "norm_placement": "both", "rms_norm_eps": 1e-6, "qk_norm": True, "hidden_act": "gelu_tanh",
    "attention_multiplier": 0.0625, "tie_word_embeddings": True,
}  # fmt: skip
_SCALED = _PRESET | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
PRESETS = {
    # 1.0B parameters.
    "gemma3-1b": {
        **_PRESET, "vocab_size": 262144, **size(1152, 26, 4, 1, 6912), "max_position_embeddings": 32768,
        "sliding_window": 512, "embedding_multiplier": 33.94112549695428,
    },
    # The text models of 4B, 12B and 27B: 3.88B, 11.8B and 27.0B, with RoPE scaling.
    "gemma3-4b": _SCALED | size(2560, 34, 8, 4, 10240, embedding_multiplier=50.59644256269407),
    "gemma3-12b": _SCALED | size(3840, 48, 16, 8, 15360, embedding_multiplier=61.96773353931867),
    "gemma3-27b": {
        **_SCALED, **size(5376, 62, 32, 16, 21504, head_dim=128), "embedding_multiplier": 73.32121111929344,
        "attention_multiplier": 0.07715167498104596,
    },
}  # fmt: skip

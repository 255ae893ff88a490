"""Gemma 2 (Gemma team, 2024): soft-capping, sliding window in every other layer, norms around attention and MLP."""

from __future__ import annotations

from typing import Any

from weft.families import llama
from weft.families.json_values import number
from weft.families.mapping import (
    Weight,
    read,
    read_layer_types,
    read_window,
    refuse,
    same,
    size,
    write,
    write_layer_types,
)
from weft.families.rope_keys import read_rope, write_rope

ARCHITECTURES = ("Gemma2ForCausalLM",)
MODEL_TYPE = "gemma2"
KEYS = same(
    "head_dim", "attention_bias", "attn_logit_softcapping", hidden_act="hidden_activation",
    logit_softcap="final_logit_softcapping",
)  # fmt: skip
DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 256000, "num_key_value_heads": 4, "max_position_embeddings": 8192, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
    "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
WEIGHTS = (
    *(weight for weight in llama.WEIGHTS if weight.name != "layers.{n}.mlp_norm"),
    Weight("layers.{n}.attention_post_norm", "model.layers.{n}.post_attention_layernorm"),
    Weight("layers.{n}.mlp_norm", "model.layers.{n}.pre_feedforward_layernorm"),
    Weight("layers.{n}.mlp_post_norm", "model.layers.{n}.post_feedforward_layernorm"),
)


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    keys = read(config, KEYS, DEFAULTS)
    layers = range(keys["num_hidden_layers"])
    windows = read_layer_types(config, read_window(config, 4096), [layer % 2 == 0 for layer in layers])
    return {"family": "gemma2", **always(config, keys["hidden_size"]), **keys, **read_rope(config, DEFAULTS), **windows}


def always(config: dict[str, Any], width: int) -> dict[str, Any]:
    """Returns the keys of `model:` that Gemma 2 and 3 have in common.

    Args:
        config: a config.json.
        width: hidden size.
    """
    refuse(config, use_bidirectional_attention=False)
    return {
        "norm": "rmsnorm1p",
        "norm_placement": "both",
        "hidden_act": "gelu_tanh",
        "embedding_multiplier": width**0.5,
        "attention_multiplier": number(config, "query_pre_attn_scalar", 256) ** -0.5,
    }


def to_hf(keys: dict[str, Any]) -> dict[str, Any]:
    return write(keys, KEYS) | write_rope(keys) | write_layer_types(keys) | {"query_pre_attn_scalar": scalar(keys)}


def scalar(keys: dict[str, Any]) -> int:
    """Returns config.json's `query_pre_attn_scalar` for keys of `model:`; Transformers takes integers only."""
    return max(1, round(keys["attention_multiplier"] ** -2))


_PRESET = {
    "family": "gemma2", "vocab_size": 256000, "max_position_embeddings": 8192, "sliding_window": 4096,
    "sliding_window_pattern": 2, "norm": "rmsnorm1p", "norm_placement": "both", "rms_norm_eps": 1e-6,
    "hidden_act": "gelu_tanh", "attn_logit_softcapping": 50.0, "logit_softcap": 30.0, "tie_word_embeddings": True,
}  # fmt: skip
_SCALE = {"head_dim": 256, "attention_multiplier": 0.0625}
PRESETS = {  # 2.61B, 9.24B and 27.2B parameters
    "gemma2-2b": _PRESET | _SCALE | size(2304, 26, 8, 4, 9216, embedding_multiplier=48.0),
    "gemma2-9b": _PRESET | _SCALE | size(3584, 42, 16, 8, 14336, embedding_multiplier=59.86651818838306),
    "gemma2-27b": {
        **_PRESET, **size(4608, 46, 32, 16, 36864, head_dim=128), "embedding_multiplier": 67.88225099390856,
        "attention_multiplier": 0.08333333333333333,
    },
}  # fmt: skip

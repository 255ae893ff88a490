"""Gemma 2 (Gemma team, 2024): capped scores and logits, every other layer with a window, norms around the parts."""

from __future__ import annotations

from typing import Any

from weft.config.model import ModelSection
from weft.models import llama
from weft.models.mapping import (
    Weight,
    attention_multiplier,
    read,
    read_layer_types,
    read_window,
    refuse,
    same,
    write,
    write_layer_types,
)
from weft.models.reading import number
from weft.models.rotations import read_rope, write_rope

ARCHITECTURES = ("Gemma2ForCausalLM",)
MODEL_TYPE = "gemma2"
KEYS = same(
    "head_dim", "attention_bias", "attn_logit_softcapping", hidden_act="hidden_activation",
    logit_softcap="final_logit_softcapping",
)  # fmt: skip
DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 256000, "num_key_value_heads": 4, "max_position_embeddings": 8192, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
    "tie_word_embeddings": True,
}  # fmt: skip
WEIGHTS = (
    *(weight for weight in llama.WEIGHTS if weight.ours != "layers.{n}.mlp_norm"),
    Weight("layers.{n}.attention_post_norm", "model.layers.{n}.post_attention_layernorm"),
    Weight("layers.{n}.mlp_norm", "model.layers.{n}.pre_feedforward_layernorm"),
    Weight("layers.{n}.mlp_post_norm", "model.layers.{n}.post_feedforward_layernorm"),
)


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `ModelSection` for a config.json. Raises UserError for what is not supported."""
    keys = read(config, KEYS, DEFAULTS)
    layers = range(keys["num_hidden_layers"])
    windows = read_layer_types(config, read_window(config, 4096), [layer % 2 == 0 for layer in layers])
    return {"family": "gemma2", **always(config, keys["hidden_size"]), **keys, **read_rope(config, DEFAULTS), **windows}


def always(config: dict[str, Any], width: int) -> dict[str, Any]:
    """What all models of Gemma 2 and 3 have."""
    refuse(config, use_bidirectional_attention=False)
    return {
        "norm": "rmsnorm1p",
        "norm_placement": "both",
        "hidden_act": "gelu_tanh",
        "embedding_multiplier": width**0.5,
        "attention_multiplier": number(config, "query_pre_attn_scalar", 256) ** -0.5,
    }


def to_hf(section: ModelSection) -> dict[str, Any]:
    """The keys of the config.json that transformers loads."""
    return (
        write(section, KEYS)
        | write_rope(section)
        | write_layer_types(section)
        | {"query_pre_attn_scalar": scalar(section)}
    )


def scalar(section: ModelSection) -> float:
    """`query_pre_attn_scalar`: a whole number where it is one."""
    value = attention_multiplier(section) ** -2
    return round(value) if abs(value - round(value)) < 1e-6 else value


PRESETS = {
    # 2.61B parameters.
    "gemma2-2b": {
        "family": "gemma2",
        "vocab_size": 256000,
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "norm": "rmsnorm1p",
        "norm_placement": "both",
        "rms_norm_eps": 1e-6,
        "hidden_act": "gelu_tanh",
        "embedding_multiplier": 48.0,
        "attention_multiplier": 0.0625,
        "attn_logit_softcapping": 50.0,
        "logit_softcap": 30.0,
        "tie_word_embeddings": True,
    },
    # 9.24B.
    "gemma2-9b": {
        "preset": "gemma2-2b",
        "hidden_size": 3584,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "embedding_multiplier": 59.86651818838306,
    },
    # 27.2B.
    "gemma2-27b": {
        "preset": "gemma2-2b",
        "hidden_size": 4608,
        "num_hidden_layers": 46,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "intermediate_size": 36864,
        "embedding_multiplier": 67.88225099390856,
        "attention_multiplier": 0.08333333333333333,
    },
}

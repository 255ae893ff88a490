"""OLMo 2 (OLMo team, 2025): norms after the parts of a block, queries and keys normalized over their whole width."""

from __future__ import annotations

from typing import Any

from weft.config.model import ModelSection
from weft.models import llama
from weft.models.mapping import Weight, read, same, write
from weft.models.rotations import read_rope, write_rope

ARCHITECTURES = ("Olmo2ForCausalLM",)
MODEL_TYPE = "olmo2"
KEYS = same("head_dim", "hidden_act", "attention_bias")
DEFAULTS = llama.DEFAULTS | {"vocab_size": 50304, "rms_norm_eps": 1e-5}
WEIGHTS = (
    *(weight for weight in llama.WEIGHTS if not weight.ours.endswith("_norm")),
    Weight("layers.{n}.attention.q_norm", "model.layers.{n}.self_attn.q_norm"),
    Weight("layers.{n}.attention.k_norm", "model.layers.{n}.self_attn.k_norm"),
    Weight("layers.{n}.attention_post_norm", "model.layers.{n}.post_attention_layernorm"),
    Weight("layers.{n}.mlp_post_norm", "model.layers.{n}.post_feedforward_layernorm"),
)
_ALWAYS = {"family": "olmo2", "qk_norm": True, "qk_norm_over": "width", "norm_placement": "post"}


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `ModelSection` for a config.json. Raises UserError for what is not supported."""
    return {**_ALWAYS, **read(config, KEYS, DEFAULTS), **read_rope(config, DEFAULTS)}


def to_hf(section: ModelSection) -> dict[str, Any]:
    """The keys of the config.json that transformers loads."""
    return write(section, KEYS) | write_rope(section)


PRESETS = {
    # 1.48B and 7.3B parameters.
    "olmo2-1b": {
        "family": "olmo2",
        "vocab_size": 100352,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-6,
        "qk_norm": True,
        "qk_norm_over": "width",
        "norm_placement": "post",
    },
    "olmo2-7b": {
        "preset": "olmo2-1b",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
    },
    # 13.7B and 32.2B.
    "olmo2-13b": {
        "preset": "olmo2-1b",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "intermediate_size": 13824,
    },
    "olmo2-32b": {
        "preset": "olmo2-1b",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 27648,
    },
}

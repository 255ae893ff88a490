"""MPT (MosaicML, 2023): GPT without biases, its positions penalties on distance (ALiBi)."""

from __future__ import annotations

from typing import Any

from weft.config.model import ModelSection
from weft.models.mapping import Weight, attention_multiplier, read, refuse, same, write
from weft.models.reading import mapping

ARCHITECTURES = ("MptForCausalLM", "MPTForCausalLM")
MODEL_TYPE = "mpt"
KEYS = same(
    hidden_size="d_model", num_attention_heads="n_heads", num_hidden_layers="n_layers",
    rms_norm_eps="layer_norm_epsilon",
    max_position_embeddings="max_seq_len",
    without=("num_key_value_heads", "intermediate_size", "attention_dropout"),
)  # fmt: skip
DEFAULTS = {
    "vocab_size": 50368, "d_model": 2048, "n_heads": 16, "n_layers": 24, "max_seq_len": 2048,
    "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "initializer_range": 0.02,
}  # fmt: skip
# Those in `attn_config`: it has one rate for the weights, and for what each part adds.
_ATTENTION = {
    "clip_qkv": "clip_qkv", "attention_multiplier": "softmax_scale", "attention_dropout": "attn_pdrop",
    "hidden_dropout": "attn_pdrop",
}  # fmt: skip
_ATTENTION_DEFAULTS = {"clip_qkv": None, "softmax_scale": None, "attn_pdrop": 0.0}
_QKV, _PARTS = "transformer.blocks.{n}.attn.Wqkv", ("q", "kv", "kv")
WEIGHTS = (
    Weight("embed_tokens", "transformer.wte"),
    Weight("layers.{n}.attention_norm", "transformer.blocks.{n}.norm_1"),
    Weight("layers.{n}.attention.q_proj", _QKV, part=(0, _PARTS)),
    Weight("layers.{n}.attention.k_proj", _QKV, part=(1, _PARTS)),
    Weight("layers.{n}.attention.v_proj", _QKV, part=(2, _PARTS)),
    Weight("layers.{n}.attention.o_proj", "transformer.blocks.{n}.attn.out_proj"),
    Weight("layers.{n}.mlp_norm", "transformer.blocks.{n}.norm_2"),
    Weight("layers.{n}.mlp.up_proj", "transformer.blocks.{n}.ffn.up_proj"),
    Weight("layers.{n}.mlp.down_proj", "transformer.blocks.{n}.ffn.down_proj"),
    Weight("norm", "transformer.norm_f"),
    Weight("lm_head", "lm_head"),
)
_ALWAYS = {
    "family": "mpt", "position": "alibi", "norm": "layernorm", "norm_bias": False, "mlp": "plain", "hidden_act": "gelu",
}  # fmt: skip


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `ModelSection` for a config.json. Raises UserError for what is not supported."""
    attention = mapping(config, "attn_config")
    refuse(attention, alibi=True, alibi_bias_max=8, qk_ln=False, prefix_lm=False, attn_type="multihead_attention")
    refuse(config, no_bias=True, expansion_ratio=4, logit_scale=None)
    return {**_ALWAYS, **read(config, KEYS, DEFAULTS), **read(attention, _ATTENTION, _ATTENTION_DEFAULTS)}


def to_hf(section: ModelSection) -> dict[str, Any]:
    """The keys of the config.json that transformers loads."""
    attention = {
        "alibi": True,
        "alibi_bias_max": 8,
        "attn_pdrop": 0,  # transformers takes whole numbers only
        "clip_qkv": section.clip_qkv,
        "softmax_scale": attention_multiplier(section),
    }
    return write(section, KEYS) | {"attn_config": attention, "no_bias": True, "expansion_ratio": 4}


PRESETS = {
    # 6.65B parameters.
    "mpt-7b": {
        "family": "mpt",
        "vocab_size": 50432,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "position": "alibi",
        "norm": "layernorm",
        "norm_bias": False,
        "mlp": "plain",
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
    },
    # 30.0B.
    "mpt-30b": {
        "preset": "mpt-7b",
        "hidden_size": 7168,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
    },
}

"""MPT (MosaicML, 2023): GPT without biases, with ALiBi in place of position embeddings."""

from __future__ import annotations

from typing import Any

from weft.families.json_values import mapping
from weft.families.mapping import QKV, Weight, fused, nested, read, refuse, same, size, write

ARCHITECTURES = ("MptForCausalLM", "MPTForCausalLM")
MODEL_TYPE = "mpt"
KEYS = same(
    hidden_size="d_model", num_attention_heads="n_heads", num_hidden_layers="n_layers",
    rms_norm_eps="layer_norm_epsilon",
    max_position_embeddings="max_seq_len",
    without=("num_key_value_heads", "intermediate_size", "attention_dropout", "pad_token_id"),
) | {
    # One dropout rate for attention weights and residual branches.
    "clip_qkv": "attn_config.clip_qkv", "attention_multiplier": "attn_config.softmax_scale",
    "attention_dropout": "attn_config.attn_pdrop", "hidden_dropout": "attn_config.attn_pdrop",
}  # fmt: skip
DEFAULTS = {
    "vocab_size": 50368, "d_model": 2048, "n_heads": 16, "n_layers": 24, "max_seq_len": 2048,
    "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "initializer_range": 0.02,
    "attn_config.clip_qkv": None, "attn_config.softmax_scale": None, "attn_config.attn_pdrop": 0.0,
}  # fmt: skip
WEIGHTS = (
    Weight("embed_tokens", "transformer.wte"),
    Weight("layers.{n}.attention_norm", "transformer.blocks.{n}.norm_1"),
    *fused("transformer.blocks.{n}.attn.Wqkv", QKV),
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
    attention = mapping(config, "attn_config")
    refuse(attention, alibi=True, alibi_bias_max=8, qk_ln=False, prefix_lm=False, attn_type="multihead_attention")
    refuse(config, no_bias=True, expansion_ratio=4, logit_scale=None)
    config = config | {f"attn_config.{key}": value for key, value in attention.items()}
    return {**_ALWAYS, **read(config, KEYS, DEFAULTS)}


def to_hf(keys: dict[str, Any]) -> dict[str, Any]:
    written = nested(write(keys, KEYS))
    # Transformers accepts only integers as attn_pdrop.
    written["attn_config"] |= {"alibi": True, "alibi_bias_max": 8, "attn_pdrop": 0}
    return written | {"no_bias": True, "expansion_ratio": 4}


_PRESET = _ALWAYS | {"vocab_size": 50432, "tie_word_embeddings": True}
PRESETS = {  # 6.65B and 30.0B parameters
    "mpt-7b": _PRESET | size(4096, 32, 32, max_position_embeddings=2048),
    "mpt-30b": _PRESET | size(7168, 48, 64, max_position_embeddings=8192),
}

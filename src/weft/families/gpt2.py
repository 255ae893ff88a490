"""GPT-2 (Radford et al., 2019): LayerNorm, learned position embeddings, a plain GELU MLP, biases, a tied head.

Presets have no dropout; the published configurations have 0.1.
"""

from __future__ import annotations

from typing import Any

from weft.families.mapping import QKV, Weight, fused, read, refuse, size, write

ARCHITECTURES = ("GPT2LMHeadModel",)
MODEL_TYPE = "gpt2"
KEYS = {
    "vocab_size": "vocab_size", "hidden_size": "n_embd", "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head", "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon", "attention_dropout": "attn_pdrop",
    "hidden_dropout": "resid_pdrop", "embedding_dropout": "embd_pdrop", "initializer_range": "initializer_range",
    "tie_word_embeddings": "tie_word_embeddings",
}  # fmt: skip
DEFAULTS = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
    "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True,
}  # fmt: skip
WEIGHTS = (
    Weight("embed_tokens", "transformer.wte"),
    Weight("embed_positions", "transformer.wpe"),
    Weight("layers.{n}.attention_norm", "transformer.h.{n}.ln_1"),
    *fused("transformer.h.{n}.attn.c_attn", QKV, transposed=True),
    Weight("layers.{n}.attention.o_proj", "transformer.h.{n}.attn.c_proj", transposed=True),
    Weight("layers.{n}.mlp_norm", "transformer.h.{n}.ln_2"),
    Weight("layers.{n}.mlp.up_proj", "transformer.h.{n}.mlp.c_fc", transposed=True),
    Weight("layers.{n}.mlp.down_proj", "transformer.h.{n}.mlp.c_proj", transposed=True),
    Weight("norm", "transformer.ln_f"),
    Weight("lm_head", "lm_head"),
)
_ALWAYS = {
    "family": "gpt2", "position": "learned", "norm": "layernorm", "mlp": "plain", "attention_bias": True,
    "mlp_bias": True,
}  # fmt: skip


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    refuse(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return {**_ALWAYS, **read(config, KEYS, DEFAULTS)}


def to_hf(keys: dict[str, Any]) -> dict[str, Any]:
    return write(keys, KEYS) | {
        "activation_function": "gelu_new" if keys["hidden_act"] == "gelu_tanh" else keys["hidden_act"]
    }


_PRESET = _ALWAYS | {
    "vocab_size": 50257, "max_position_embeddings": 1024, "hidden_act": "gelu_tanh", "tie_word_embeddings": True,
}  # fmt: skip
PRESETS = {  # 124M, 355M, 774M and 1.56B parameters
    "gpt2": _PRESET | size(768, 12, 12, None, 3072),
    "gpt2-medium": _PRESET | size(1024, 24, 16, None, 4096),
    "gpt2-large": _PRESET | size(1280, 36, 20, None, 5120),
    "gpt2-xl": _PRESET | size(1600, 48, 25, None, 6400),
}

"""Llama (Touvron et al., 2023): RMSNorm, rotary embedding, gated SiLU, grouped-query attention."""

from __future__ import annotations

from typing import Any

from weft.families.mapping import Weight, renaming, same, size

ARCHITECTURES = ("LlamaForCausalLM",)
MODEL_TYPE = "llama"
KEYS = same("head_dim", "hidden_act", "attention_bias", "mlp_bias")
# Transformers' defaults.
DEFAULTS = {
    "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "attention_dropout": 0.0, "initializer_range": 0.02, "rope_theta": 10000.0, "pad_token_id": None,
}  # fmt: skip
WEIGHTS = (
    Weight("embed_tokens", "model.embed_tokens"),
    Weight("layers.{n}.attention_norm", "model.layers.{n}.input_layernorm"),
    Weight("layers.{n}.attention.q_proj", "model.layers.{n}.self_attn.q_proj"),
    Weight("layers.{n}.attention.k_proj", "model.layers.{n}.self_attn.k_proj"),
    Weight("layers.{n}.attention.v_proj", "model.layers.{n}.self_attn.v_proj"),
    Weight("layers.{n}.attention.o_proj", "model.layers.{n}.self_attn.o_proj"),
    Weight("layers.{n}.mlp_norm", "model.layers.{n}.post_attention_layernorm"),
    Weight("layers.{n}.mlp.gate_proj", "model.layers.{n}.mlp.gate_proj"),
    Weight("layers.{n}.mlp.up_proj", "model.layers.{n}.mlp.up_proj"),
    Weight("layers.{n}.mlp.down_proj", "model.layers.{n}.mlp.down_proj"),
    Weight("norm", "model.norm"),
    Weight("lm_head", "lm_head"),
)
QK_NORMS = (
    Weight("layers.{n}.attention.q_norm", "model.layers.{n}.self_attn.q_norm"),
    Weight("layers.{n}.attention.k_norm", "model.layers.{n}.self_attn.k_norm"),
)

from_hf, to_hf = renaming({"family": "llama"}, KEYS, DEFAULTS)

_PLAIN = {"family": "llama", "max_position_embeddings": 2048}
_LLAMA3 = {"family": "llama", "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0}
_SMOLLM2 = {"family": "llama", "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True}


def _scaled(factor: float) -> dict[str, Any]:
    """Returns the keys of `model:` that Llama 3.1 and 3.2 presets share.

    RoPE scaling by `factor` extends the context from 8,192 to 131,072 tokens.
    """
    scaling = {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": 8192}
    return _LLAMA3 | {"max_position_embeddings": 131072, "rope_scaling": scaling}


PRESETS = {
    # For tests: trains in seconds.
    "llama-tiny": _PLAIN | size(64, 2, 4, 2, 176),
    # With a vocabulary of 32,000: 22.9M, 58M, 134M and 368M parameters; llama-14m with a vocabulary of 8,192: 13.8M.
    "llama-14m": _PLAIN | size(384, 6, 6, None, 1024, tie_word_embeddings=True),
    "llama-60m": _PLAIN | size(512, 8, 8, None, 1376),
    "llama-125m": _PLAIN | size(768, 12, 12, None, 2048),
    "llama-350m": _PLAIN | size(1024, 24, 16, None, 2736),
    # The sizes of Llama 3.2 1B and 3B, without RoPE scaling to 128k tokens; and Llama 3 8B.
    "llama-1b": _LLAMA3 | size(2048, 16, 32, 8, 8192, head_dim=64, tie_word_embeddings=True),
    "llama-3b": _LLAMA3 | size(3072, 28, 24, 8, 8192, head_dim=128, tie_word_embeddings=True),
    "llama-8b": _LLAMA3 | size(4096, 32, 32, 8, 14336),
    # Llama 3.2 1B and 3B: 1.24B and 3.21B.
    "llama3.2-1b": _scaled(32.0) | size(2048, 16, 32, 8, 8192, head_dim=64, tie_word_embeddings=True),
    "llama3.2-3b": _scaled(32.0) | size(3072, 28, 24, 8, 8192, head_dim=128, tie_word_embeddings=True),
    # Llama 3.1 8B, 70B and 405B: 8.03B, 70.6B and 406B.
    "llama3.1-8b": _scaled(8.0) | size(4096, 32, 32, 8, 14336),
    "llama3.1-70b": _scaled(8.0) | size(8192, 80, 64, 8, 28672),
    "llama3.1-405b": _scaled(8.0) | size(16384, 126, 128, 8, 53248),
    # Llama 2 7B: 6.74B.
    "llama2-7b": _PLAIN | size(4096, 32, 32, None, 11008, vocab_size=32000, max_position_embeddings=4096),
    # The same architecture: TinyLlama (Zhang et al., 2024) and SmolLM2 (Allal et al., 2025).
    "tinyllama-1.1b": _PLAIN | size(2048, 22, 32, 4, 5632, vocab_size=32000),
    "smollm2-135m": _SMOLLM2 | size(576, 30, 9, 3, 1536, rope_theta=100000.0),
    "smollm2-360m": _SMOLLM2 | size(960, 32, 15, 5, 2560, rope_theta=100000.0),
    "smollm2-1.7b": _SMOLLM2 | size(2048, 24, 32, None, 8192, rope_theta=130000.0),
}

"""Llama (Touvron et al., 2023): RMSNorm, rotary positions, gated SiLU, grouped keys and values."""

from __future__ import annotations

from typing import Any

from weft.config.model import ModelSection
from weft.models.mapping import Weight, read, same, write
from weft.models.rotations import read_rope, write_rope

ARCHITECTURES = ("LlamaForCausalLM",)
MODEL_TYPE = "llama"
KEYS = same("head_dim", "hidden_act", "attention_bias", "mlp_bias")
# transformers' own, for a config.json that leaves keys out.
DEFAULTS = {
    "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "attention_dropout": 0.0, "initializer_range": 0.02, "rope_theta": 10000.0,
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


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `ModelSection` for a config.json. Raises UserError for what is not supported."""
    return {"family": "llama", **read(config, KEYS, DEFAULTS), **read_rope(config, DEFAULTS)}


def to_hf(section: ModelSection) -> dict[str, Any]:
    """The keys of the config.json that transformers loads."""
    return write(section, KEYS) | write_rope(section)


PRESETS = {
    # For tests: trains in seconds.
    "llama-tiny": {
        "family": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 176,
        "max_position_embeddings": 2048,
    },
    # 13.8M parameters with 8,192 words, 22.9M with 32,000.
    "llama-14m": {
        "family": "llama",
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "intermediate_size": 1024,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    # 58M with 32,000 words.
    "llama-60m": {
        "family": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "intermediate_size": 1376,
        "max_position_embeddings": 2048,
    },
    # 134M with 32,000 words.
    "llama-125m": {
        "family": "llama",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 2048,
        "max_position_embeddings": 2048,
    },
    # 368M with 32,000 words.
    "llama-350m": {
        "family": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 2736,
        "max_position_embeddings": 2048,
    },
    # The sizes of Llama 3.2 1B and 3B, without their scaling of the rotations to 128k positions.
    "llama-1b": {
        "family": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "llama-3b": {
        "preset": "llama-1b",
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
    },
    # Llama 3 8B.
    "llama-8b": {
        "family": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    # Llama 3.2 1B and 3B: 1.24B and 3.21B.
    "llama3.2-1b": {
        "preset": "llama-1b",
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192},
    },
    "llama3.2-3b": {
        "preset": "llama-1b",
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192},
    },
    # Llama 3.1 8B, 70B and 405B: 8.03B, 70.6B and 406B.
    "llama3.1-8b": {
        "preset": "llama-8b",
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
    },
    "llama3.1-70b": {
        "preset": "llama-8b",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "intermediate_size": 28672,
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
    },
    "llama3.1-405b": {
        "preset": "llama-8b",
        "hidden_size": 16384,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "intermediate_size": 53248,
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
    },
    # Llama 2 7B: 6.74B.
    "llama2-7b": {
        "family": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
    },
    # Llama's parts under other names: TinyLlama (Zhang et al., 2024) and SmolLM2 (Allal et al., 2025).
    "tinyllama-1.1b": {
        "family": "llama",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
        "max_position_embeddings": 2048,
    },
    "smollm2-135m": {
        "family": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "smollm2-360m": {
        "preset": "smollm2-135m",
        "hidden_size": 960,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "intermediate_size": 2560,
    },
    "smollm2-1.7b": {
        "family": "llama",
        "vocab_size": 49152,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "intermediate_size": 8192,
        "max_position_embeddings": 8192,
        "rope_theta": 130000.0,
        "tie_word_embeddings": True,
    },
}

"""Qwen 3 (Yang et al., 2025), dense: Llama with norms of queries and keys, and an explicit head size."""

from __future__ import annotations

from weft.families import llama, qwen2
from weft.families.mapping import renaming, same, size

ARCHITECTURES = ("Qwen3ForCausalLM",)
MODEL_TYPE = "qwen3"
KEYS = same("head_dim", "hidden_act", "attention_bias")
DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 151936, "num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128,
}  # fmt: skip
WEIGHTS = (*llama.WEIGHTS, *llama.QK_NORMS)
from_hf, to_hf = renaming({"family": "qwen3", "qk_norm": True}, KEYS, DEFAULTS, qwen2.WINDOWS)

_PRESET = {
    "family": "qwen3", "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960,
    "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "qk_norm": True,
}  # fmt: skip
PRESETS = {  # Qwen3 0.6B and 8B: 596M and 8.19B parameters
    "qwen3-0.6b": _PRESET | size(1024, 28, 16, 8, 3072, tie_word_embeddings=True),
    "qwen3-1.7b": _PRESET | size(2048, 28, 16, 8, 6144, tie_word_embeddings=True),
    "qwen3-4b": _PRESET | size(2560, 36, 32, 8, 9728, tie_word_embeddings=True),
    "qwen3-8b": _PRESET | size(4096, 36, 32, 8, 12288),
    "qwen3-14b": _PRESET | size(5120, 40, 40, 8, 17408),
    "qwen3-32b": _PRESET | size(5120, 64, 64, 8, 25600),
}

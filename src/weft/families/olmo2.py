"""OLMo 2 (OLMo team, 2025): norms after attention and MLP, norms of queries and keys over all heads."""

from __future__ import annotations

from weft.families import llama
from weft.families.mapping import Weight, renaming, same, size

ARCHITECTURES = ("Olmo2ForCausalLM",)
MODEL_TYPE = "olmo2"
KEYS = same("head_dim", "hidden_act", "attention_bias")
DEFAULTS = llama.DEFAULTS | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "pad_token_id": 1}
WEIGHTS = (
    *(weight for weight in llama.WEIGHTS if not weight.name.endswith("_norm")),
    *llama.QK_NORMS,
    Weight("layers.{n}.attention_post_norm", "model.layers.{n}.post_attention_layernorm"),
    Weight("layers.{n}.mlp_post_norm", "model.layers.{n}.post_feedforward_layernorm"),
)
_ALWAYS = {"family": "olmo2", "qk_norm": True, "qk_norm_over": "width", "norm_placement": "post"}
from_hf, to_hf = renaming(_ALWAYS, KEYS, DEFAULTS)

_PRESET = _ALWAYS | {
    "vocab_size": 100352, "max_position_embeddings": 4096, "rope_theta": 500000.0, "rms_norm_eps": 1e-6,
}  # fmt: skip
PRESETS = {  # 1.48B, 7.3B, 13.7B and 32.2B parameters
    "olmo2-1b": _PRESET | size(2048, 16, 16, None, 8192),
    "olmo2-7b": _PRESET | size(4096, 32, 32, None, 11008),
    "olmo2-13b": _PRESET | size(5120, 40, 40, None, 13824),
    "olmo2-32b": _PRESET | size(5120, 64, 40, 8, 27648),
}

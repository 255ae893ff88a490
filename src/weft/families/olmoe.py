"""OLMoE (Muennighoff et al., 2024): many small experts, norms of queries and keys over all heads."""

from __future__ import annotations

from typing import Any

from weft.families import llama, qwen3_moe
from weft.families.mapping import refuse, renaming, same, size

ARCHITECTURES = ("OlmoeForCausalLM",)
CLASSIFIER = None
MODEL_TYPE = "olmoe"
KEYS = same("hidden_act", "attention_bias", "clip_qkv") | {
    "moe.num_experts": "num_experts",
    "moe.num_experts_per_tok": "num_experts_per_tok",
    "moe.norm_topk_prob": "norm_topk_prob",
    "moe.router_aux_loss_coef": "router_aux_loss_coef",
}
DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "clip_qkv": None,
    "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.01,
    "pad_token_id": 1,
}  # fmt: skip
WEIGHTS = qwen3_moe.WEIGHTS
_ALWAYS = {"family": "olmoe", "qk_norm": True, "qk_norm_over": "width"}
_from_hf, to_hf = renaming(_ALWAYS, KEYS, DEFAULTS)


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    keys = _from_hf(config)
    refuse(config, head_dim=keys["hidden_size"] // keys["num_attention_heads"])
    return keys


PRESETS = {
    # 6.92B parameters, active per token: 1.3B.
    "olmoe-1b-7b": {
        **_ALWAYS, "vocab_size": 50304, **size(2048, 16, 16, None, 1024), "max_position_embeddings": 4096,
        "moe": {
            "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.01,
        },
    },
}  # fmt: skip

"""OLMoE (Muennighoff et al., 2024): many small experts, queries and keys normalized over their whole width."""

from __future__ import annotations

from typing import Any

from weft.families import llama, qwen3_moe
from weft.families.mapping import read, refuse, same, size, write
from weft.families.rope_keys import read_rope, write_rope

ARCHITECTURES = ("OlmoeForCausalLM",)
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


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `model:` for a config.json. Raises UserError for what is not supported."""
    keys = read(config, KEYS, DEFAULTS)
    refuse(config, head_dim=keys["hidden_size"] // keys["num_attention_heads"])
    return {**_ALWAYS, **keys, **read_rope(config, DEFAULTS)}


def to_hf(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of the config.json that transformers loads."""
    return write(keys, KEYS) | write_rope(keys)


PRESETS = {
    # 6.92B parameters, of which a token goes through 1.3B.
    "olmoe-1b-7b": {
        **_ALWAYS, "vocab_size": 50304, **size(2048, 16, 16, None, 1024), "max_position_embeddings": 4096,
        "moe": {
            "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.01,
        },
    },
}  # fmt: skip

"""DeepSeek-V3 (DeepSeek-AI, 2024): a sigmoid router, balanced by a correction bias instead of a loss."""

from __future__ import annotations

from typing import Any

from weft.families import deepseek_v2, llama
from weft.families.mapping import Weight, read, refuse, same, size

ARCHITECTURES = ("DeepseekV3ForCausalLM",)
MODEL_TYPE = "deepseek_v3"
LATENT = (*deepseek_v2.LATENT, "rope_interleave")
KEYS = (
    same("hidden_act", "attention_bias", "num_nextn_predict_layers")
    | {f"mla.{key}": key for key in LATENT}
    | deepseek_v2.EXPERTS
    | {"moe.norm_topk_prob": "norm_topk_prob"}
)
DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 129280, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "rope_interleave": True, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
    "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
_NULL_IS_FALSE = ("norm_topk_prob", "rope_interleave")
_NAMES = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "head_norm": "shared_head.norm"}
WEIGHTS = deepseek_v2.WEIGHTS + tuple(
    Weight(f"layers.{{n}}.{name}", f"model.layers.{{n}}.{hf_name}") for name, hf_name in _NAMES.items()
)
PREDICTION_COPIES = {
    "embed_tokens.weight": "model.layers.{n}.embed_tokens.weight",
    "lm_head.weight": "model.layers.{n}.shared_head.head.weight",
}


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    refuse(config, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    config = {key: False if key in _NULL_IS_FALSE and value is None else value for key, value in config.items()}
    keys = {"family": "deepseek_v3", **read(config, KEYS, DEFAULTS)}
    keys |= deepseek_v2.read_latent_rope(config, keys["mla"], DEFAULTS)
    keys["moe"] |= {"scoring_func": "sigmoid", "correction_bias": True}
    return keys


def to_hf(keys: dict[str, Any]) -> dict[str, Any]:
    more = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return deepseek_v2.write_latent(keys, KEYS) | more


PRESETS = {
    # 671B parameters, active per token: 37B.
    "deepseek-v3": {
        "family": "deepseek_v3", "vocab_size": 129280, **size(7168, 61, 128, None, 18432),
        "max_position_embeddings": 163840,
        "rope_scaling": deepseek_v2.YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "attention_multiplier": 0.1352337788608801, "rms_norm_eps": 1e-6,
        "mla": {
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        "moe": {
            "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
            "first_k_dense_replace": 3, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "n_group": 8,
            "topk_group": 4, "correction_bias": True,
        },
    },
}  # fmt: skip

"""DeepSeek-V2 (DeepSeek-AI, 2024): latent attention, many small experts, and shared experts."""

from __future__ import annotations

import math
import reprlib
from typing import Any

from weft.errors import UserError
from weft.families import llama
from weft.families.json_values import number
from weft.families.mapping import Weight, expert_weights, read, refuse, same, size, write
from weft.families.rope_keys import read_rope, rope_mapping, write_rope

ARCHITECTURES = ("DeepseekV2ForCausalLM",)
MODEL_TYPE = "deepseek_v2"
LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
EXPERTS = {
    "moe.num_experts": "n_routed_experts",
    "moe.num_experts_per_tok": "num_experts_per_tok",
    "moe.moe_intermediate_size": "moe_intermediate_size",
    "moe.n_shared_experts": "n_shared_experts",
    "moe.first_k_dense_replace": "first_k_dense_replace",
    "moe.routed_scaling_factor": "routed_scaling_factor",
    "moe.n_group": "n_group",
    "moe.topk_group": "topk_group",
}
KEYS = same("hidden_act", "attention_bias", "mlp_bias") | {f"mla.{key}": key for key in LATENT} | EXPERTS
DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 102400, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2,
    "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "n_group": None, "topk_group": None,
}  # fmt: skip
_ATTENTION, _MLP = "model.layers.{n}.self_attn", "model.layers.{n}.mlp"
WEIGHTS = (
    *llama.WEIGHTS,
    Weight("layers.{n}.attention.q_a_proj", f"{_ATTENTION}.q_a_proj"),
    Weight("layers.{n}.attention.q_a_norm", f"{_ATTENTION}.q_a_layernorm"),
    Weight("layers.{n}.attention.q_b_proj", f"{_ATTENTION}.q_b_proj"),
    Weight("layers.{n}.attention.kv_a_proj", f"{_ATTENTION}.kv_a_proj_with_mqa"),
    Weight("layers.{n}.attention.kv_a_norm", f"{_ATTENTION}.kv_a_layernorm"),
    Weight("layers.{n}.attention.kv_b_proj", f"{_ATTENTION}.kv_b_proj"),
    Weight("layers.{n}.mlp.router", f"{_MLP}.gate"),
    Weight("layers.{n}.mlp.router.correction_bias", f"{_MLP}.gate.e_score_correction_bias"),
    *expert_weights(f"{_MLP}.experts"),
    Weight("layers.{n}.mlp.shared.gate_proj", f"{_MLP}.shared_experts.gate_proj"),
    Weight("layers.{n}.mlp.shared.up_proj", f"{_MLP}.shared_experts.up_proj"),
    Weight("layers.{n}.mlp.shared.down_proj", f"{_MLP}.shared_experts.down_proj"),
)


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    refuse(config, norm_topk_prob=False, scoring_func="softmax", moe_layer_freq=1)
    method = config.get("topk_method") or "greedy"
    if method == "greedy":
        config = config | {"n_group": None, "topk_group": None}
    else:
        refuse(config, topk_method="group_limited_greedy")
    keys = {"family": "deepseek_v2", **read(config, KEYS, DEFAULTS)}
    keys |= read_latent_rope(config, keys["mla"], DEFAULTS)
    keys["moe"] |= {"norm_topk_prob": False}
    return keys


def to_hf(keys: dict[str, Any]) -> dict[str, Any]:
    grouped = (keys["moe"] or {}).get("n_group", 1) > 1
    method = "group_limited_greedy" if grouped else "greedy"
    return write_latent(keys, KEYS) | {"topk_method": method, "norm_topk_prob": False, "scoring_func": "softmax"}


def read_latent_rope(config: dict[str, Any], mla: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of `model:` for the rotary embedding, and the attention multiplier that RoPE scaling implies.

    Args:
        config: a config.json.
        mla: the keys of `model.mla`.
        defaults: default values of the family's config.json keys.
    """
    rotary_dim = mla["qk_rope_head_dim"]
    if config.get("head_dim", rotary_dim) != rotary_dim:  # Transformers rotates head_dim dimensions if it is set
        raise UserError(
            f"head_dim: {reprlib.repr(config['head_dim'])} differs from qk_rope_head_dim, {rotary_dim}; remove head_dim"
        )
    keys, given = read_rope(config, defaults), rope_mapping(config)
    if "rope_scaling" in keys and given.get("mscale_all_dim") not in (None, 0):
        mscale = number(given, "mscale_all_dim", 1.0)
        mscale = 0.1 * mscale * math.log(max(keys["rope_scaling"]["factor"], 1.0)) + 1
        keys["attention_multiplier"] = (mla["qk_nope_head_dim"] + rotary_dim) ** -0.5 * mscale**2
    return keys


def write_latent(keys: dict[str, Any], table: dict[str, str]) -> dict[str, Any]:
    """Converts keys of `model:` to a config.json.

    In config.json, `head_dim` is the number of rotary dimensions, as in Transformers' class.

    Args:
        keys: keys of `model:`.
        table: key of `model:` -> key of config.json.
    """
    rotary_dim = (keys["mla"] or {}).get("qk_rope_head_dim", keys["head_dim"])
    return write(keys, table) | write_rope(keys) | {"head_dim": rotary_dim}


YARN = {
    "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
PRESETS = {
    # 15.7B parameters, active per token: 2.7B.
    "deepseek-v2-lite": {
        "family": "deepseek_v2", "vocab_size": 102400, **size(2048, 27, 16, None, 10944),
        "max_position_embeddings": 163840, "rope_scaling": YARN, "attention_multiplier": 0.1147213867929261,
        "rms_norm_eps": 1e-6,
        "mla": {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        "moe": {
            "num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2,
            "first_k_dense_replace": 1, "norm_topk_prob": False, "router_aux_loss_coef": 0.001,
        },
    },
    # 236B, active per token: 21B.
    "deepseek-v2": {
        "preset": "deepseek-v2-lite", **size(5120, 60, 128, None, 12288), "mla": {"q_lora_rank": 1536},
        "moe": {
            "num_experts": 160, "moe_intermediate_size": 1536, "routed_scaling_factor": 16.0, "n_group": 8,
            "topk_group": 3,
        },
    },
}  # fmt: skip

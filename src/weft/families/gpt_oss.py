"""gpt-oss (OpenAI, 2025): experts with biases, attention sinks, a sliding window in every other layer."""

from __future__ import annotations

from typing import Any

from weft.families import llama
from weft.families.mapping import (
    Weight,
    fused,
    read,
    read_layer_types,
    read_window,
    refuse,
    same,
    size,
    write,
    write_layer_types,
)
from weft.families.rope_keys import read_rope, write_rope

ARCHITECTURES = ("GptOssForCausalLM",)
MODEL_TYPE = "gpt_oss"
KEYS = same("head_dim", "hidden_act", "attention_bias") | {
    "moe.num_experts": "num_local_experts",
    "moe.num_experts_per_tok": "num_experts_per_tok",
    "moe.swiglu_limit": "swiglu_limit",
    "moe.router_aux_loss_coef": "router_aux_loss_coef",
}
DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True,
    "max_position_embeddings": 131072, "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
    "router_aux_loss_coef": 0.001, "rope_theta": 150000.0,
}  # fmt: skip
_MLP, _EXPERT = "model.layers.{n}.mlp", "layers.{n}.mlp.experts"
_GATE_UP = {f"{_EXPERT}.gate_proj": "inner", f"{_EXPERT}.up_proj": "inner"}
_GATE_UP_BIAS = {f"{_EXPERT}.gate_bias": "inner", f"{_EXPERT}.up_bias": "inner"}
WEIGHTS = (
    *(weight for weight in llama.WEIGHTS if ".mlp." not in weight.name),
    Weight("layers.{n}.attention.attend.sinks", "model.layers.{n}.self_attn.sinks"),
    Weight("layers.{n}.mlp.router", f"{_MLP}.router"),
    *fused(f"{_MLP}.experts.gate_up_proj", _GATE_UP, alternating=True, transposed=True, stacked=True),
    *fused(f"{_MLP}.experts.gate_up_proj_bias", _GATE_UP_BIAS, alternating=True, stacked=True),
    Weight(f"{_EXPERT}.down_proj", f"{_MLP}.experts.down_proj", transposed=True, stacked=True),
    Weight(f"{_EXPERT}.down_bias", f"{_MLP}.experts.down_proj_bias", stacked=True),
)
_EXPERTS = {"scoring_func": "softmax_of_chosen", "router_bias": True, "expert_bias": True}
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    refuse(config, swiglu_alpha=1.702, hidden_act="silu")
    if config.get("rope_parameters") is None:
        config = config | {"rope_parameters": _YARN}
    keys = {"family": "gpt_oss", "attention_sinks": True, **read(config, KEYS, DEFAULTS)}
    keys["moe"] |= _EXPERTS
    slides = [layer % 2 == 0 for layer in range(keys["num_hidden_layers"])]
    windows = read_layer_types(config, read_window(config, 128), slides)
    return keys | read_rope(config, DEFAULTS) | windows


def to_hf(keys: dict[str, Any]) -> dict[str, Any]:
    written = write(keys, KEYS) | write_rope(keys) | write_layer_types(keys)
    # Transformers builds a sliding window mask even if no layer uses it.
    return written | {"sliding_window": written["sliding_window"] or 128, "swiglu_alpha": 1.702}


PRESETS = {
    # 20.9B parameters, active per token: 3.6B.
    "gpt-oss-20b": {
        "family": "gpt_oss", "vocab_size": 201088, **size(2880, 24, 64, 8, 2880, head_dim=64),
        "max_position_embeddings": 131072, "rope_theta": 150000.0, "rope_scaling": _YARN, "sliding_window": 128,
        "sliding_window_pattern": 2, "attention_bias": True, "attention_sinks": True,
        "moe": {
            **_EXPERTS, "num_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "router_aux_loss_coef": 0.001,
        },
    },
    # 117B, active per token: 5.1B.
    "gpt-oss-120b": {"preset": "gpt-oss-20b", "num_hidden_layers": 36, "moe": {"num_experts": 128}},
}  # fmt: skip

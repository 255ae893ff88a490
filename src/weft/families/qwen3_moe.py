"""Qwen 3 (Yang et al., 2025) with a mixture of experts."""

from __future__ import annotations

from typing import Any

from weft.families import qwen2, qwen3
from weft.families.mapping import Weight, expert_weights, renaming, size

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
MODEL_TYPE = "qwen3_moe"
KEYS = qwen3.KEYS | {
    "moe.num_experts": "num_local_experts",
    "moe.num_experts_per_tok": "num_experts_per_tok",
    "moe.moe_intermediate_size": "moe_intermediate_size",
    "moe.decoder_sparse_step": "decoder_sparse_step",
    "moe.mlp_only_layers": "mlp_only_layers",
    "moe.norm_topk_prob": "norm_topk_prob",
    "moe.router_aux_loss_coef": "router_aux_loss_coef",
}
DEFAULTS = qwen3.DEFAULTS | {
    "num_key_value_heads": 4, "head_dim": None, "intermediate_size": 6144, "num_local_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
_MLP = "model.layers.{n}.mlp"
WEIGHTS = (
    *qwen3.WEIGHTS, Weight("layers.{n}.mlp.router", f"{_MLP}.gate"), *expert_weights(f"{_MLP}.experts"),
)  # fmt: skip
_from_hf, _to_hf = renaming({"family": "qwen3_moe", "qk_norm": True}, KEYS, DEFAULTS, qwen2.WINDOWS)


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    if "num_experts" in config:  # the name in Transformers 4
        config = {"num_local_experts": config["num_experts"], **config}
    if config.get("mlp_only_layers", []) is None:
        config = config | {"mlp_only_layers": []}
    return _from_hf(config)


def to_hf(keys: dict[str, Any]) -> dict[str, Any]:
    written = _to_hf(keys)
    return written | {"num_experts": written["num_local_experts"]}


PRESETS = {
    # 30.5B parameters, active per token: 3.3B.
    "qwen3-30b-a3b": {
        "family": "qwen3_moe", "vocab_size": 151936, **size(2048, 48, 32, 4, 6144, head_dim=128),
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "qk_norm": True,
        "moe": {
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "router_aux_loss_coef": 0.001,
        },
    },
    # 235B, active per token: 22B.
    "qwen3-235b-a22b": {
        "preset": "qwen3-30b-a3b", **size(4096, 94, 64, 4, 12288), "moe": {"moe_intermediate_size": 1536},
    },
}  # fmt: skip

"""Qwen 3 (Yang et al., 2025) with a mixture of small experts."""

from __future__ import annotations

from typing import Any

from weft.families import qwen3
from weft.families.mapping import Weight, read, size, write
from weft.families.qwen2 import read_windows, write_windows
from weft.families.rope_keys import read_rope, write_rope

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
    *qwen3.WEIGHTS,
    Weight("layers.{n}.mlp.router", f"{_MLP}.gate"),
    Weight("layers.{n}.mlp.experts.gate_proj", _MLP + ".experts.{e}.gate_proj.weight"),
    Weight("layers.{n}.mlp.experts.up_proj", _MLP + ".experts.{e}.up_proj.weight"),
    Weight("layers.{n}.mlp.experts.down_proj", _MLP + ".experts.{e}.down_proj.weight"),
)


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `model:` for a config.json. Raises UserError for what is not supported."""
    if "num_experts" in config:  # transformers 4's name
        config = {"num_local_experts": config["num_experts"], **config}
    if config.get("mlp_only_layers", []) is None:
        config = config | {"mlp_only_layers": []}
    keys = read(config, KEYS, DEFAULTS)
    windows = read_windows(config, keys["num_hidden_layers"])
    return {"family": "qwen3_moe", "qk_norm": True, **keys, **read_rope(config, DEFAULTS), **windows}


def to_hf(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of the config.json that transformers loads."""
    written = write(keys, KEYS)
    return written | {"num_experts": written["num_local_experts"]} | write_rope(keys) | write_windows(keys)


PRESETS = {
    # 30.5B parameters, of which a token goes through 3.3B.
    "qwen3-30b-a3b": {
        "family": "qwen3_moe", "vocab_size": 151936, **size(2048, 48, 32, 4, 6144, head_dim=128),
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "qk_norm": True,
        "moe": {
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "router_aux_loss_coef": 0.001,
        },
    },
    # 235B, of which a token goes through 22B.
    "qwen3-235b-a22b": {
        "preset": "qwen3-30b-a3b", **size(4096, 94, 64, 4, 12288), "moe": {"moe_intermediate_size": 1536},
    },
}  # fmt: skip

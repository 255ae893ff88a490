"""Mixtral (Jiang et al., 2024): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from weft.families import llama, mistral
from weft.families.mapping import Weight, expert_weights, renaming, same, size

ARCHITECTURES = ("MixtralForCausalLM",)
MODEL_TYPE = "mixtral"
KEYS = same("head_dim", "hidden_act", "sliding_window") | {
    "moe.num_experts": "num_local_experts",
    "moe.num_experts_per_tok": "num_experts_per_tok",
    "moe.router_aux_loss_coef": "router_aux_loss_coef",
}
DEFAULTS = mistral.DEFAULTS | {
    "vocab_size": 32000, "intermediate_size": 14336, "rms_norm_eps": 1e-5, "sliding_window": None,
    "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001,
    "rope_theta": 1000000.0,
}  # fmt: skip
_MOE = "model.layers.{n}.block_sparse_moe"
WEIGHTS = (
    *(weight for weight in llama.WEIGHTS if ".mlp." not in weight.name),
    Weight("layers.{n}.mlp.router", f"{_MOE}.gate"),
    *expert_weights(f"{_MOE}.experts", gate="w1", up="w3", down="w2"),
)
from_hf, to_hf = renaming({"family": "mixtral"}, KEYS, DEFAULTS, router_jitter_noise=0.0)

PRESETS = {
    # 46.7B parameters, active per token: 12.9B.
    "mixtral-8x7b": {
        "family": "mixtral", "vocab_size": 32000, **size(4096, 32, 32, 8, 14336), "max_position_embeddings": 32768,
        "rope_theta": 1000000.0, "moe": {"num_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02},
    },
    # 141B, active per token: 39B.
    "mixtral-8x22b": {
        "preset": "mixtral-8x7b", **size(6144, 56, 48, 8, 16384), "max_position_embeddings": 65536,
        "moe": {"router_aux_loss_coef": 0.001},
    },
}  # fmt: skip

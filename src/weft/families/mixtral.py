"""Mixtral (Jiang et al., 2024): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from weft.families import llama, mistral
from weft.families.mapping import Weight, renaming, same, size

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
_THEIRS = "model.layers.{n}.block_sparse_moe"
WEIGHTS = (
    *(weight for weight in llama.WEIGHTS if ".mlp." not in weight.name),
    Weight("layers.{n}.mlp.router", f"{_THEIRS}.gate"),
    Weight("layers.{n}.mlp.experts.gate_proj", _THEIRS + ".experts.{e}.w1.weight"),
    Weight("layers.{n}.mlp.experts.up_proj", _THEIRS + ".experts.{e}.w3.weight"),
    Weight("layers.{n}.mlp.experts.down_proj", _THEIRS + ".experts.{e}.w2.weight"),
)
from_hf, to_hf = renaming({"family": "mixtral"}, KEYS, DEFAULTS, router_jitter_noise=0.0)

PRESETS = {
    # 46.7B parameters, of which a token goes through 12.9B.
    "mixtral-8x7b": {
        "family": "mixtral", "vocab_size": 32000, **size(4096, 32, 32, 8, 14336), "max_position_embeddings": 32768,
        "rope_theta": 1000000.0, "moe": {"num_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02},
    },
    # 141B, of which a token goes through 39B.
    "mixtral-8x22b": {
        "preset": "mixtral-8x7b", **size(6144, 56, 48, 8, 16384), "max_position_embeddings": 65536,
        "moe": {"router_aux_loss_coef": 0.001},
    },
}  # fmt: skip

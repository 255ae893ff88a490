"""Mixtral (Jiang et al., 2024): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from weft.config.model import ModelSection
from weft.models import llama, mistral
from weft.models.mapping import Weight, read, refuse, same, write
from weft.models.rotations import read_rope, write_rope

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
    *(weight for weight in llama.WEIGHTS if ".mlp." not in weight.ours),
    Weight("layers.{n}.mlp.router", f"{_THEIRS}.gate"),
    Weight("layers.{n}.mlp.experts.gate_proj", _THEIRS + ".experts.{e}.w1.weight"),
    Weight("layers.{n}.mlp.experts.up_proj", _THEIRS + ".experts.{e}.w3.weight"),
    Weight("layers.{n}.mlp.experts.down_proj", _THEIRS + ".experts.{e}.w2.weight"),
)


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `ModelSection` for a config.json. Raises UserError for what is not supported."""
    refuse(config, router_jitter_noise=0.0)
    return {"family": "mixtral", **read(config, KEYS, DEFAULTS), **read_rope(config, DEFAULTS)}


def to_hf(section: ModelSection) -> dict[str, Any]:
    """The keys of the config.json that transformers loads."""
    return write(section, KEYS) | write_rope(section)


PRESETS = {
    # 46.7B parameters, of which a token goes through 12.9B.
    "mixtral-8x7b": {
        "family": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "moe": {"num_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02},
    },
    # 141B, of which a token goes through 39B.
    "mixtral-8x22b": {
        "preset": "mixtral-8x7b",
        "hidden_size": 6144,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "intermediate_size": 16384,
        "max_position_embeddings": 65536,
        "moe": {"router_aux_loss_coef": 0.001},
    },
}

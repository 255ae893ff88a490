"""Phi-3 (Abdin et al., 2024): Llama with a sliding window and fused matrices in its files."""

from __future__ import annotations

from typing import Any

from weft.errors import UserError
from weft.families import llama
from weft.families.mapping import QKV, fused, read, same, size, write
from weft.families.rope_keys import read_rope, write_rope

ARCHITECTURES = ("Phi3ForCausalLM",)
MODEL_TYPE = "phi3"
KEYS = same("head_dim", "hidden_act", "sliding_window", hidden_dropout="resid_pdrop", embedding_dropout="embd_pdrop")
DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 32064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
}  # fmt: skip
_FUSED = (
    *fused("model.layers.{n}.self_attn.qkv_proj", QKV),
    *fused(
        "model.layers.{n}.mlp.gate_up_proj", {"layers.{n}.mlp.gate_proj": "inner", "layers.{n}.mlp.up_proj": "inner"}
    ),
)
WEIGHTS = (*(weight for weight in llama.WEIGHTS if weight.name not in {one.name for one in _FUSED}), *_FUSED)


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    config = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        given = config.get(key)
        if isinstance(given, dict) and given.get("rope_type", given.get("type")) in ("su", "yarn"):
            config[key] = given | {"rope_type": "longrope"}  # as in older files and in Transformers
    rope = read_rope(config, DEFAULTS, partial=1.0)
    kind = rope["rope_scaling"]["rope_type"] if "rope_scaling" in rope else "longrope"
    if kind != "longrope":
        raise UserError(f"rope_scaling: rope_type {kind!r} is not supported for Phi-3; use 'longrope'")
    return {"family": "phi3", **read(config, KEYS, DEFAULTS), **rope}


def to_hf(keys: dict[str, Any]) -> dict[str, Any]:
    written, scaling, original = write(keys, KEYS) | write_rope(keys), keys["rope_scaling"], None
    if scaling is not None:
        original = scaling["original_max_position_embeddings"]
        default = keys["max_position_embeddings"] / (original or 1)
        if scaling["attention_factor"] is None and scaling["factor"] == default:
            # Transformers before 5 accepts exactly these keys, and computes the other values.
            lists = {key: written["rope_scaling"].get(key) for key in ("short_factor", "long_factor")}
            written["rope_scaling"] = {"type": scaling["rope_type"], **lists}
    return written | {"original_max_position_embeddings": original or keys["max_position_embeddings"]}


_MINI = {"family": "phi3", "vocab_size": 32064, "max_position_embeddings": 4096, "sliding_window": 2047}
_PHI4 = {"family": "phi3", "vocab_size": 100352, "max_position_embeddings": 16384, "rope_theta": 250000.0}
PRESETS = {
    # Phi-3 mini and medium with a context of 4k tokens: 3.82B and 14.0B parameters. Phi-4: 14.7B.
    "phi3-mini": _MINI | size(3072, 32, 32, None, 8192),
    "phi3-medium": _MINI | size(5120, 40, 40, 10, 17920),
    "phi4": _PHI4 | size(5120, 40, 40, 10, 17920),
}

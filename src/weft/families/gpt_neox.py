"""GPT-NeoX (Black et al., 2022), Pythia: parallel attention and MLP, LayerNorm, partial rotary embedding."""

from __future__ import annotations

from typing import Any

from weft.families import llama
from weft.families.mapping import QKV, Weight, fused, read, refuse, same, size, write
from weft.families.rope_keys import read_rope, write_rope

ARCHITECTURES = ("GPTNeoXForCausalLM",)
MODEL_TYPE = "gpt_neox"
KEYS = same(
    "hidden_act", "hidden_dropout", "attention_bias", "use_parallel_residual", rms_norm_eps="layer_norm_eps",
    embedding_dropout="hidden_dropout",
    without=("num_key_value_heads", "pad_token_id"),
)  # fmt: skip
DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 50432, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "hidden_dropout": 0.0, "attention_bias": True,
    "use_parallel_residual": True,
}  # fmt: skip
WEIGHTS = (
    Weight("embed_tokens", "gpt_neox.embed_in"),
    Weight("layers.{n}.attention_norm", "gpt_neox.layers.{n}.input_layernorm"),
    *fused("gpt_neox.layers.{n}.attention.query_key_value", QKV, by_head=True),
    Weight("layers.{n}.attention.o_proj", "gpt_neox.layers.{n}.attention.dense"),
    Weight("layers.{n}.mlp_norm", "gpt_neox.layers.{n}.post_attention_layernorm"),
    Weight("layers.{n}.mlp.up_proj", "gpt_neox.layers.{n}.mlp.dense_h_to_4h"),
    Weight("layers.{n}.mlp.down_proj", "gpt_neox.layers.{n}.mlp.dense_4h_to_h"),
    Weight("norm", "gpt_neox.final_layer_norm"),
    Weight("lm_head", "embed_out"),
)
_ALWAYS = {"family": "gpt_neox", "norm": "layernorm", "mlp": "plain", "mlp_bias": True}


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    keys = read(config, KEYS, DEFAULTS)
    # Transformers' class ignores head_dim for the size of heads, but uses head_dim for the rotary embedding.
    refuse(config, head_dim=keys["hidden_size"] // keys["num_attention_heads"])
    config = config | {
        "rope_theta": config.get("rotary_emb_base", 10000.0),
        "partial_rotary_factor": config.get("rotary_pct", 0.25),
    }
    return {**_ALWAYS, **keys, **read_rope(config, DEFAULTS, partial=0.25)}


def to_hf(keys: dict[str, Any]) -> dict[str, Any]:
    written = write(keys, KEYS)
    rope = write_rope(keys)
    rope["rope_parameters"]["partial_rotary_factor"] = keys["partial_rotary_factor"]
    return written | rope | {"rotary_emb_base": keys["rope_theta"], "rotary_pct": keys["partial_rotary_factor"]}


_PRESET = _ALWAYS | {
    "vocab_size": 50304, "max_position_embeddings": 2048, "partial_rotary_factor": 0.25, "use_parallel_residual": True,
    "hidden_act": "gelu", "attention_bias": True,
}  # fmt: skip
PRESETS = {
    # Pythia (Biderman et al., 2023).
    "pythia-70m": _PRESET | size(512, 6, 8, None, 2048),
    "pythia-160m": _PRESET | size(768, 12, 12, None, 3072),
    "pythia-410m": _PRESET | size(1024, 24, 16, None, 4096),
    "pythia-1b": _PRESET | size(2048, 16, 8, None, 8192),
    "pythia-1.4b": _PRESET | size(2048, 24, 16, None, 8192),
    "pythia-2.8b": _PRESET | size(2560, 32, 32, None, 10240),
    "pythia-6.9b": _PRESET | size(4096, 32, 32, None, 16384, vocab_size=50432),
    "pythia-12b": _PRESET | size(5120, 36, 40, None, 20480, vocab_size=50688),
    # GPT-NeoX-20B (Black et al., 2022).
    "gpt-neox-20b": _PRESET | size(6144, 44, 64, None, 24576, vocab_size=50432, hidden_act="gelu_tanh"),
}

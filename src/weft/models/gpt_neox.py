"""GPT-NeoX (Black et al., 2022), Pythia: attention and MLP side by side, LayerNorm, a quarter of each head rotated."""

from __future__ import annotations

from typing import Any

from weft.config.model import ModelSection
from weft.models import llama
from weft.models.mapping import Weight, read, refuse, same, write
from weft.models.rotations import read_rope, write_rope

ARCHITECTURES = ("GPTNeoXForCausalLM",)
MODEL_TYPE = "gpt_neox"
KEYS = same(
    "hidden_act", "hidden_dropout", "attention_bias", "use_parallel_residual", rms_norm_eps="layer_norm_eps",
    embedding_dropout="hidden_dropout",
    without=("num_key_value_heads",),
)  # fmt: skip
DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 50432, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "hidden_dropout": 0.0, "attention_bias": True,
    "use_parallel_residual": True,
}  # fmt: skip
_QKV, _HEADS = "gpt_neox.layers.{n}.attention.query_key_value", ("q", "kv", "kv")
WEIGHTS = (
    Weight("embed_tokens", "gpt_neox.embed_in"),
    Weight("layers.{n}.attention_norm", "gpt_neox.layers.{n}.input_layernorm"),
    Weight("layers.{n}.attention.q_proj", _QKV, part=(0, _HEADS), by_head=True),
    Weight("layers.{n}.attention.k_proj", _QKV, part=(1, _HEADS), by_head=True),
    Weight("layers.{n}.attention.v_proj", _QKV, part=(2, _HEADS), by_head=True),
    Weight("layers.{n}.attention.o_proj", "gpt_neox.layers.{n}.attention.dense"),
    Weight("layers.{n}.mlp_norm", "gpt_neox.layers.{n}.post_attention_layernorm"),
    Weight("layers.{n}.mlp.up_proj", "gpt_neox.layers.{n}.mlp.dense_h_to_4h"),
    Weight("layers.{n}.mlp.down_proj", "gpt_neox.layers.{n}.mlp.dense_4h_to_h"),
    Weight("norm", "gpt_neox.final_layer_norm"),
    Weight("lm_head", "embed_out"),
)
_ALWAYS = {"family": "gpt_neox", "norm": "layernorm", "mlp": "plain", "mlp_bias": True}


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `ModelSection` for a config.json. Raises UserError for what is not supported."""
    keys = read(config, KEYS, DEFAULTS)
    # Its class cuts the width into heads without looking at it, and rotates by it.
    refuse(config, head_dim=keys["hidden_size"] // keys["num_attention_heads"])
    own = {
        "rope_theta": config.get("rotary_emb_base", 10000.0),
        "partial_rotary_factor": config.get("rotary_pct", 0.25),
    }
    return {**_ALWAYS, **keys, **read_rope(config | own, DEFAULTS, partial=0.25)}


def to_hf(section: ModelSection) -> dict[str, Any]:
    """The keys of the config.json that transformers loads."""
    written = write(section, KEYS)
    rope = write_rope(section)
    rope["rope_parameters"]["partial_rotary_factor"] = section.partial_rotary_factor
    return written | rope | {"rotary_emb_base": section.rope_theta, "rotary_pct": section.partial_rotary_factor}


PRESETS = {
    # Pythia (Biderman et al., 2023).
    "pythia-70m": {
        "family": "gpt_neox",
        "vocab_size": 50304,
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.25,
        "norm": "layernorm",
        "use_parallel_residual": True,
        "mlp": "plain",
        "hidden_act": "gelu",
        "attention_bias": True,
        "mlp_bias": True,
    },
    "pythia-160m": {
        "preset": "pythia-70m",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "pythia-410m": {
        "preset": "pythia-70m",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "pythia-1b": {"preset": "pythia-70m", "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192},
    "pythia-1.4b": {
        "preset": "pythia-70m",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 8192,
    },
    "pythia-2.8b": {
        "preset": "pythia-70m",
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 10240,
    },
    "pythia-6.9b": {
        "preset": "pythia-70m",
        "vocab_size": 50432,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 16384,
    },
    "pythia-12b": {
        "preset": "pythia-70m",
        "vocab_size": 50688,
        "hidden_size": 5120,
        "num_hidden_layers": 36,
        "num_attention_heads": 40,
        "intermediate_size": 20480,
    },
    # GPT-NeoX-20B (Black et al., 2022).
    "gpt-neox-20b": {
        "preset": "pythia-70m",
        "vocab_size": 50432,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "hidden_act": "gelu_tanh",
    },
}

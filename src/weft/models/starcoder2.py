"""StarCoder2 (Lozhkov et al., 2024): LayerNorm, biases, a plain GELU MLP, rotations and a sliding window."""

from __future__ import annotations

from typing import Any

from weft.config.model import ModelSection
from weft.models import llama
from weft.models.mapping import Weight, read, same, write
from weft.models.rotations import read_rope, write_rope

ARCHITECTURES = ("Starcoder2ForCausalLM",)
MODEL_TYPE = "starcoder2"
KEYS = same(
    "head_dim", "hidden_act", "sliding_window", "embedding_dropout", rms_norm_eps="norm_epsilon",
    hidden_dropout="residual_dropout", attention_bias="use_bias", mlp_bias="use_bias",
)  # fmt: skip
DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 49152, "num_key_value_heads": 2, "max_position_embeddings": 4096, "sliding_window": None,
    "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "use_bias": True, "residual_dropout": 0.0,
    "embedding_dropout": 0.0, "initializer_range": 0.018042, "tie_word_embeddings": True,
}  # fmt: skip
WEIGHTS = (
    *(weight for weight in llama.WEIGHTS if ".mlp." not in weight.ours),
    Weight("layers.{n}.mlp.up_proj", "model.layers.{n}.mlp.c_fc"),
    Weight("layers.{n}.mlp.down_proj", "model.layers.{n}.mlp.c_proj"),
)


def from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `ModelSection` for a config.json. Raises UserError for what is not supported."""
    always = {"family": "starcoder2", "norm": "layernorm", "mlp": "plain"}
    return {**always, **read(config, KEYS, DEFAULTS), **read_rope(config, DEFAULTS)}


def to_hf(section: ModelSection) -> dict[str, Any]:
    """The keys of the config.json that transformers loads."""
    return write(section, KEYS) | write_rope(section)


PRESETS = {
    # 3.03B parameters.
    "starcoder2-3b": {
        "family": "starcoder2",
        "vocab_size": 49152,
        "hidden_size": 3072,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "intermediate_size": 12288,
        "max_position_embeddings": 16384,
        "sliding_window": 4096,
        "rope_theta": 999999.4420358813,
        "norm": "layernorm",
        "mlp": "plain",
        "hidden_act": "gelu_tanh",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    # 7.17B.
    "starcoder2-7b": {
        "preset": "starcoder2-3b",
        "hidden_size": 4608,
        "num_hidden_layers": 32,
        "num_attention_heads": 36,
        "num_key_value_heads": 4,
        "intermediate_size": 18432,
        "rope_theta": 1000000.0,
    },
}

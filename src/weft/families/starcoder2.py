"""StarCoder2 (Lozhkov et al., 2024): LayerNorm, biases, a plain GELU MLP and a sliding window."""

from __future__ import annotations

from weft.families import llama
from weft.families.mapping import Weight, renaming, same, size

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
    *(weight for weight in llama.WEIGHTS if ".mlp." not in weight.name),
    Weight("layers.{n}.mlp.up_proj", "model.layers.{n}.mlp.c_fc"),
    Weight("layers.{n}.mlp.down_proj", "model.layers.{n}.mlp.c_proj"),
)
_ALWAYS = {"family": "starcoder2", "norm": "layernorm", "mlp": "plain"}
from_hf, to_hf = renaming(_ALWAYS, KEYS, DEFAULTS)

_PRESET = _ALWAYS | {
    "vocab_size": 49152, "max_position_embeddings": 16384, "sliding_window": 4096, "hidden_act": "gelu_tanh",
    "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
}  # fmt: skip
PRESETS = {  # 3.03B and 7.17B parameters
    "starcoder2-3b": _PRESET | size(3072, 30, 24, 2, 12288, rope_theta=999999.4420358813),
    "starcoder2-7b": _PRESET | size(4608, 32, 36, 4, 18432, rope_theta=1000000.0),
}

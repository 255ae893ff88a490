"""One table per architecture of llama.cpp: names of tensors and metadata keys, and what llama.cpp computes.

The names are those of the GGUF format. The values come from llama.cpp's code for each architecture, because a GGUF file
does not describe the computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RMS, LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
# Key of `model:` -> metadata key, without the architecture's name.
_KEYS = {
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
}  # fmt: skip
_ROTARY = {**_KEYS, "rms_norm_eps": RMS, "head_dim": "attention.key_length", "rope_theta": "rope.freq_base"}
_EXPERT_KEYS = {"moe.num_experts": "expert_count", "moe.num_experts_per_tok": "expert_used_count"}
_WINDOW_KEY = {"sliding_window": "attention.sliding_window"}
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}

# GGUF's name of a tensor, without `.weight` and `.bias` -> Weft's names of the modules, or of single tensors; several
# are concatenated. The name of a bias that is a single tensor ends with `.bias`.
Tensors = Mapping[str, tuple[str, ...]]


def _layer(**names: str | tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Returns table entries of a layer: GGUF's name -> Weft's name or names, without the prefixes of the layer."""
    pairs = {name: ours if isinstance(ours, tuple) else (ours,) for name, ours in names.items()}
    return {f"blk.{{n}}.{name}": tuple(f"layers.{{n}}.{one}" for one in ours) for name, ours in pairs.items()}


_ENDS = {"token_embd": ("embed_tokens",), "output_norm": ("norm",), "output": ("lm_head",)}
_NORMS = _layer(attn_norm="attention_norm", ffn_norm="mlp_norm")
_POST_NORMS = _layer(post_attention_norm="attention_post_norm", post_ffw_norm="mlp_post_norm")
_QK_NORMS = _layer(attn_q_norm="attention.q_norm", attn_k_norm="attention.k_norm")
_OUT = _layer(attn_output="attention.o_proj")
_QKV = _OUT | _layer(attn_q="attention.q_proj", attn_k="attention.k_proj", attn_v="attention.v_proj")
_FUSED_QKV = _OUT | _layer(attn_qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"))
_PLAIN = _layer(ffn_up="mlp.up_proj", ffn_down="mlp.down_proj")
_GATED = _PLAIN | _layer(ffn_gate="mlp.gate_proj")
_EXPERTS = _layer(
    ffn_gate_inp="mlp.router", ffn_gate_exps="mlp.experts.gate_proj", ffn_up_exps="mlp.experts.up_proj",
    ffn_down_exps="mlp.experts.down_proj",
)  # fmt: skip
_EXPERT_BIASES = _layer(**{f"ffn_{one}_exps.bias": f"mlp.experts.{one}_bias" for one in ("gate", "up", "down")})
_LLAMA = _ENDS | _NORMS | _QKV | _GATED
_ALL_BIASES, _NO_BIASES = {"attention_bias": (False, True)}, {"attention_bias": (False,)}


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores and computes the models of a family.

    Attributes:
        name: the value of `general.architecture`.
        family: Weft's family for models that are imported.
        tensors: names of tensors.
        keys: key of `model:` -> metadata key, without the architecture's name.
        always: keys of `model:` that all models of the architecture have, with their values.
        limits: key of `model:` -> the values with which llama.cpp computes.
        activations: the supported values of `hidden_act`.
        interleaved: whether a rotary embedding rotates pairs of adjacent dimensions, so that the rows of queries and
            keys are stored in another order.
        own_output: whether the output head must be stored, also if it is tied.
        only_tied: whether the output head is always the embedding.
        square: whether head_dim must be hidden_size / num_attention_heads.
        factors: whether frequencies can have factors (`rope_freqs`), which the scaling "llama3" needs.
        scalings: further supported values of `rope_scaling.rope_type`.
        windows: whether llama.cpp applies sliding windows.
        scale_in_keys: whether `attention_multiplier` is a metadata key.
    """

    name: str
    family: str
    tensors: Tensors
    keys: Mapping[str, str] = field(default_factory=lambda: _ROTARY)
    always: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: _NO_BIASES)
    activations: tuple[str, ...] = ("silu",)
    interleaved: bool = False
    own_output: bool = False
    only_tied: bool = False
    square: bool = False
    factors: bool = False
    scalings: tuple[str, ...] = ("linear", "yarn")
    windows: bool = False
    scale_in_keys: bool = False

    def attention_scale(self, keys: Mapping[str, Any]) -> float:
        """Returns the factor of the dot products of queries and keys in llama.cpp, for resolved keys of `model:`."""
        layers_27b = {"gemma2": 46, "gemma3": 62}.get(self.name)  # llama.cpp recognizes the 27B models by their depth
        if keys["num_hidden_layers"] == layers_27b:
            return (keys["hidden_size"] // keys["num_attention_heads"]) ** -0.5
        return keys["head_dim"] ** -0.5


_LAYER_NORM_KEYS = {**_KEYS, "rms_norm_eps": LAYER_NORM}
_GEMMA = {
    "norm": "rmsnorm1p", "norm_placement": "both", "hidden_act": "gelu_tanh", "tie_word_embeddings": True,
}  # fmt: skip
_GPT = {"norm": "layernorm", "mlp": "plain", "attention_bias": True, "mlp_bias": True}
_GEMMA_TENSORS = _LLAMA | _POST_NORMS
_LONG = ("linear", "yarn", "longrope")
_SCALES = {
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale", "logits_scaling": "logit_scale",
}  # fmt: skip
_MIXTRAL = {name: ours for name, ours in _LLAMA.items() if name not in _GATED} | _EXPERTS
_PHI3 = _ENDS | _NORMS | _FUSED_QKV | _PLAIN | _layer(ffn_up=("mlp.gate_proj", "mlp.up_proj"))
_MOE_LIMIT = {"moe.decoder_sparse_step": (1,), "moe.mlp_only_layers": ([],)}

_SHARED = _layer(
    ffn_gate_shexp="mlp.shared.gate_proj", ffn_up_shexp="mlp.shared.up_proj", ffn_down_shexp="mlp.shared.down_proj"
)
# `attn_k_b` and `attn_v_b` are parts of one matrix (`latent.stored_part`).
_LATENT = _OUT | _layer(
    attn_q="attention.q_proj", attn_q_a="attention.q_a_proj", attn_q_a_norm="attention.q_a_norm",
    attn_q_b="attention.q_b_proj", attn_kv_a_mqa="attention.kv_a_proj", attn_kv_a_norm="attention.kv_a_norm",
    attn_k_b="attention.kv_b_proj", attn_v_b="attention.kv_b_proj",
)  # fmt: skip
_DEEPSEEK = Architecture(
    "deepseek2", "deepseek_v2",
    _ENDS | _NORMS | _LATENT | _GATED | _EXPERTS | _SHARED
    | _layer(**{"exp_probs_b.bias": "mlp.router.correction_bias"}),
    {
        **{key: name for key, name in _ROTARY.items() if key != "head_dim"}, **_EXPERT_KEYS,
        "mla.q_lora_rank": "attention.q_lora_rank", "mla.kv_lora_rank": "attention.kv_lora_rank",
        "moe.moe_intermediate_size": "expert_feed_forward_length", "moe.n_shared_experts": "expert_shared_count",
        "moe.first_k_dense_replace": "leading_dense_block_count", "moe.routed_scaling_factor": "expert_weights_scale",
        "moe.norm_topk_prob": "expert_weights_norm", "moe.n_group": "expert_group_count",
        "moe.topk_group": "expert_group_used_count",
    },
    limits={**_NO_BIASES, "attention_output_bias": (False,), "mlp_bias": (False,), **_MOE_LIMIT},
)  # fmt: skip

# Weft's family -> the architecture in which its models are stored.
ARCHITECTURES = {
    "llama": Architecture(
        "llama", "llama", _LLAMA, limits=_ALL_BIASES, interleaved=True, factors=True, scalings=_LONG
    ),
    "mixtral": Architecture(
        "llama", "mixtral", _MIXTRAL, {**_ROTARY, **_EXPERT_KEYS}, interleaved=True, factors=True, scalings=_LONG
    ),
    "qwen2": Architecture(
        "qwen2", "qwen2", _LLAMA, square=True, always={"attention_bias": True, "attention_output_bias": False},
        limits={"attention_bias": (True,), "attention_output_bias": (False,)},
    ),
    "qwen3": Architecture("qwen3", "qwen3", _LLAMA | _QK_NORMS, always={"qk_norm": True}),
    "qwen3_moe": Architecture(
        "qwen3moe", "qwen3_moe", _MIXTRAL | _QK_NORMS,
        {**_ROTARY, **_EXPERT_KEYS, "moe.moe_intermediate_size": "expert_feed_forward_length"},
        always={"qk_norm": True}, limits={**_NO_BIASES, **_MOE_LIMIT, "moe.norm_topk_prob": (True,)},
    ),
    "olmoe": Architecture(
        "olmoe", "olmoe", _MIXTRAL | _QK_NORMS, {**_ROTARY, **_EXPERT_KEYS}, own_output=True, square=True,
        always={"qk_norm": True, "qk_norm_over": "width", "moe.norm_topk_prob": False},
        limits={**_NO_BIASES, "clip_qkv": (None,), "moe.norm_topk_prob": (False,)},
    ),
    "olmo2": Architecture(
        "olmo2", "olmo2", _ENDS | _POST_NORMS | _QK_NORMS | _QKV | _GATED, own_output=True, square=True,
        always={"qk_norm": True, "qk_norm_over": "width", "norm_placement": "post"},
    ),
    "gemma2": Architecture(
        "gemma2", "gemma2", _GEMMA_TENSORS, {**_ROTARY, **_CAPS, **_WINDOW_KEY}, _GEMMA, only_tied=True, windows=True,
        activations=("gelu_tanh",), scalings=("linear",),
    ),
    "gemma3": Architecture(
        "gemma3", "gemma3", _GEMMA_TENSORS | _QK_NORMS,
        {
            **_ROTARY, "logit_softcap": _CAPS["logit_softcap"], **_WINDOW_KEY,
            "rope_local_base_freq": "rope.freq_base_swa",
        },
        {**_GEMMA, "qk_norm": True}, windows=True, activations=("gelu_tanh",), scalings=("linear",),
    ),
    "gpt_oss": Architecture(
        "gpt-oss", "gpt_oss",
        _ENDS | _QKV | _EXPERTS | _EXPERT_BIASES
        | _layer(attn_norm="attention_norm", post_attention_norm="mlp_norm", attn_sinks="attention.attend.sinks"),
        {**_ROTARY, **_EXPERT_KEYS, "moe.moe_intermediate_size": "expert_feed_forward_length", **_WINDOW_KEY},
        always={
            "attention_bias": True, "attention_sinks": True, "moe.scoring_func": "softmax_of_chosen",
            "moe.router_bias": True, "moe.expert_bias": True, "moe.swiglu_limit": 7.0,
        },
        limits={"attention_bias": (True,), "moe.swiglu_limit": (7.0,)}, own_output=True, windows=True,
    ),
    "phi3": Architecture("phi3", "phi3", _PHI3, square=True, scalings=_LONG),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "granite": Architecture(
        "granite", "granite", _LLAMA, {**_ROTARY, **_SCALES}, limits={**_ALL_BIASES, "mlp_bias": (False,)},
        interleaved=True, factors=True, scalings=_LONG, scale_in_keys=True,
    ),
    "smollm3": Architecture(
        "smollm3", "smollm3", _LLAMA, interleaved=True, always={"no_rope_layer_interval": 4},
        limits={**_NO_BIASES, "mlp_bias": (False,)},
    ),
    "starcoder2": Architecture(
        "starcoder2", "starcoder2", _ENDS | _NORMS | _QKV | _PLAIN, {**_ROTARY, "rms_norm_eps": LAYER_NORM},
        always={**_GPT, "hidden_act": "gelu_tanh"}, limits={"attention_bias": (True,), "mlp_bias": (True,)},
        activations=("gelu_tanh",), square=True,
    ),
    "gpt_neox": Architecture(
        "gptneox", "gpt_neox", _ENDS | _NORMS | _FUSED_QKV | _PLAIN,
        {**_LAYER_NORM_KEYS, "rope_theta": "rope.freq_base", "use_parallel_residual": "use_parallel_residual"},
        always={**_GPT, "hidden_act": "gelu"},
        limits={"attention_bias": (True,)}, activations=("gelu", "gelu_tanh"), own_output=True, square=True,
    ),
    "gpt2": Architecture(
        "gpt2", "gpt2", _ENDS | _NORMS | _FUSED_QKV | _PLAIN | {"position_embd": ("embed_positions",)},
        _LAYER_NORM_KEYS, square=True, activations=("gelu_tanh",), limits={},
        always={**_GPT, "position": "learned", "hidden_act": "gelu_tanh"},
    ),
    "mpt": Architecture(
        "mpt", "mpt", _ENDS | _NORMS | _FUSED_QKV | _PLAIN,
        {**_LAYER_NORM_KEYS, "alibi_bias_max": "attention.max_alibi_bias", "clip_qkv": "attention.clamp_kqv"},
        always={"position": "alibi", "norm": "layernorm", "norm_bias": False, "mlp": "plain", "hidden_act": "gelu"},
        activations=("gelu",), square=True,
    ),
}  # fmt: skip
# Mistral is Llama with a sliding window, which llama.cpp ignores in this architecture.
ARCHITECTURES["mistral"] = ARCHITECTURES["llama"]

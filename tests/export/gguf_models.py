"""Tiny models of every architecture that Weft exports to GGUF, for tests with and without llama.cpp."""

import math

SIZES = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 256,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
_LONG = {
    "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * n for n in range(8)], "long_factor": [1.5 + 0.5 * n for n in range(8)],
}  # fmt: skip
_GEMMA = {
    "norm": "rmsnorm1p", "norm_placement": "both", "hidden_act": "gelu_tanh", "embedding_multiplier": 8.0,
    "tie_word_embeddings": True, "head_dim": 32,
}  # fmt: skip
_LAYER_NORM = {"norm": "layernorm", "mlp": "plain", "attention_bias": True, "mlp_bias": True}
_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
_GROUPS = EXPERTS | {
    "moe_intermediate_size": 64, "n_shared_experts": 1, "scoring_func": "sigmoid", "correction_bias": True,
    "routed_scaling_factor": 1.5, "n_group": 2, "topk_group": 1,
}  # fmt: skip

# Name -> `model:` section.
MODELS = {
    "llama": GROUPED,
    "llama-biases": GROUPED | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama3-rope": GROUPED | {"rope_scaling": _LLAMA3},
    "llama-yarn": GROUPED | {"rope_scaling": _YARN},
    "llama-linear": GROUPED | {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "mistral": GROUPED | {"family": "mistral", "sliding_window": 96},
    "mixtral": GROUPED | {"family": "mixtral", "moe": EXPERTS},
    "qwen2": GROUPED | {"family": "qwen2", "attention_bias": True, "attention_output_bias": False},
    "qwen3": GROUPED | {"family": "qwen3", "qk_norm": True, "head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": GROUPED | {"family": "qwen3_moe", "qk_norm": True, "moe": EXPERTS | {"moe_intermediate_size": 64}},
    "gemma2": GROUPED | _GEMMA | {
        "family": "gemma2", "attention_multiplier": 0.125, "attn_logit_softcapping": 50.0, "logit_softcap": 30.0,
        "sliding_window": 32, "sliding_window_pattern": 2,
    },
    "gemma3": GROUPED | _GEMMA | {
        "family": "gemma3", "attention_multiplier": 0.125, "qk_norm": True, "sliding_window": 32,
        "num_hidden_layers": 3, "sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "gpt_oss": GROUPED | {
        "family": "gpt_oss", "attention_sinks": True, "attention_bias": True, "head_dim": 32, "sliding_window": 32,
        "sliding_window_pattern": 2, "rope_scaling": _YARN,
        "moe": EXPERTS | {
            "scoring_func": "softmax_of_chosen", "router_bias": True, "expert_bias": True, "swiglu_limit": 7.0
        },
    },
    "phi3": GROUPED | {"family": "phi3", "rope_scaling": _LONG},
    "granite": GROUPED | {
        "family": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
        "attention_multiplier": 0.2,
    },
    "smollm3": GROUPED | {"family": "smollm3", "num_hidden_layers": 4, "no_rope_layer_interval": 4},
    "olmo2": GROUPED | {"family": "olmo2", "qk_norm": True, "qk_norm_over": "width", "norm_placement": "post"},
    "olmoe": SIZES | {
        "family": "olmoe", "qk_norm": True, "qk_norm_over": "width", "moe": EXPERTS | {"norm_topk_prob": False},
        "tie_word_embeddings": True,
    },
    "starcoder2": GROUPED | _LAYER_NORM | {"family": "starcoder2", "hidden_act": "gelu_tanh"},
    "gpt_neox": SIZES | _LAYER_NORM | {
        "family": "gpt_neox", "hidden_act": "gelu", "use_parallel_residual": True, "partial_rotary_factor": 0.5,
    },
    "gpt2": SIZES | _LAYER_NORM | {
        "family": "gpt2", "position": "learned", "hidden_act": "gelu_tanh", "tie_word_embeddings": True,
    },
    "deepseek_v2": SIZES | {
        "family": "deepseek_v2", "num_hidden_layers": 3, "mla": _LATENT,
        "attention_multiplier": 32**-0.5 * (1 + 0.1 * 0.9 * math.log(4)) ** 2,
        "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.9},
        "moe": EXPERTS | {
            "moe_intermediate_size": 64, "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": False,
            "routed_scaling_factor": 2.0,
        },
    },
    "deepseek_v3": SIZES | {
        "family": "deepseek_v3", "mla": _LATENT | {"q_lora_rank": 48},
        "rms_norm_eps": 1e-6, "rope_scaling": {"rope_type": "linear", "factor": 3.0}, "moe": _GROUPS,
    },
    "deepseek_v3-halves": SIZES | {
        "family": "deepseek_v3", "mla": _LATENT | {"q_lora_rank": 48, "rope_interleave": False}, "rms_norm_eps": 1e-2,
        "moe": _GROUPS | {"topk_group": 2},
    },
    "mpt": SIZES | {
        "family": "mpt", "position": "alibi", "norm": "layernorm", "norm_bias": False, "mlp": "plain",
        "hidden_act": "gelu", "tie_word_embeddings": True, "intermediate_size": 256,
    },
}  # fmt: skip

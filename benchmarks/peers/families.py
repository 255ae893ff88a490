"""One small model of each family for a CPU, and one of about a billion parameters of the main ones for a GPU."""

from pathlib import Path

_LLAMA = {
    "vocab_size": 16_384,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 688,
    "max_position_embeddings": 2048,
}
_EXPERTS = _LLAMA | {"num_hidden_layers": 6, "intermediate_size": 256}
_PLAIN = {
    "mlp": "plain",
    "norm": "layernorm",
    "hidden_act": "gelu",
    "num_key_value_heads": 4,
    "intermediate_size": 1024,
}
_LATENT = {"q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
_BIASES = {"attention_bias": True, "attention_sinks": True}
_GEMMA = _LLAMA | {
    "norm": "rmsnorm1p",
    "norm_placement": "both",
    "hidden_act": "gelu_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 128,
    "embedding_multiplier": 16.0,
}
_DEEPSEEK = _EXPERTS | {"num_key_value_heads": 4, "head_dim": None, "mla": _LATENT}
_SHARED = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96, "n_shared_experts": 1}
_SHARED |= {"first_k_dense_replace": 1}
_SIGMOID = {"scoring_func": "sigmoid", "correction_bias": True, "routed_scaling_factor": 2.5}
_OSS = {"scoring_func": "softmax_of_chosen", "router_bias": True, "expert_bias": True, "swiglu_limit": 7.0}

# 10 to 20 million parameters each.
CPU = {
    "llama": _LLAMA,
    "gemma3": _GEMMA | {"qk_norm": True, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6},
    "qwen3": _LLAMA | {"qk_norm": True},
    "gpt_neox": _LLAMA
    | _PLAIN
    | {"use_parallel_residual": True, "partial_rotary_factor": 0.25, "attention_bias": True, "mlp_bias": True},
    "mistral": _LLAMA | {"sliding_window": 128},
    "olmo2": _LLAMA
    | {"norm_placement": "post", "qk_norm": True, "qk_norm_over": "width", "num_key_value_heads": 4, "head_dim": None},
    "mixtral": _EXPERTS | {"moe": {"num_experts": 8, "num_experts_per_tok": 2}},
    "qwen3_moe": _EXPERTS
    | {"qk_norm": True, "moe": {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64}},
    "deepseek_v3": _DEEPSEEK | {"moe": _SHARED | {"n_group": 4, "topk_group": 2} | _SIGMOID},
    "gpt_oss": _EXPERTS
    | _BIASES
    | {"sliding_window": 128, "sliding_window_pattern": 2, "intermediate_size": 128}
    | {"moe": {"num_experts": 16, "num_experts_per_tok": 4} | _OSS},
    "mpt": _LLAMA | _PLAIN | {"position": "alibi", "norm_bias": False, "tie_word_embeddings": True, "head_dim": None},
    "gpt2": _LLAMA
    | _PLAIN
    | {"position": "learned", "hidden_act": "gelu_tanh", "attention_bias": True, "mlp_bias": True}
    | {"tie_word_embeddings": True, "head_dim": None},
    "qwen2": _LLAMA | {"attention_bias": True, "attention_output_bias": False},
    "gemma2": _GEMMA
    | {"sliding_window_pattern": 2, "attention_multiplier": 64**-0.5}
    | {"attn_logit_softcapping": 50.0, "logit_softcap": 30.0},
    "phi3": _LLAMA,
    "granite": _LLAMA
    | {"embedding_multiplier": 12.0, "attention_multiplier": 2**-6, "residual_multiplier": 0.22}
    | {"logits_scaling": 8.0, "tie_word_embeddings": True},
    "smollm3": _LLAMA | {"no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0], "tie_word_embeddings": True},
    "starcoder2": _LLAMA
    | _PLAIN
    | {"num_key_value_heads": 2, "hidden_act": "gelu_tanh", "attention_bias": True, "mlp_bias": True}
    | {"sliding_window": 128, "tie_word_embeddings": True},
    "olmoe": _EXPERTS
    | {"qk_norm": True, "qk_norm_over": "width", "num_key_value_heads": 4, "head_dim": None, "intermediate_size": 64}
    | {"moe": {"num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": False}},
    "deepseek_v2": _DEEPSEEK | {"moe": _SHARED | {"norm_topk_prob": False}},
}

_BILLION = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 5632,
}
_DEEP = {"num_attention_heads": 16, "num_key_value_heads": 16}
_FEW = _BILLION | {"hidden_size": 1024, "num_hidden_layers": 12, "intermediate_size": 3072}

# The same parts, at about a billion parameters.
GPU = {
    "llama": _BILLION,
    "gemma3": _BILLION | {"embedding_multiplier": 2048**0.5},
    "qwen3": _BILLION,
    "gpt_neox": _BILLION | _DEEP | {"intermediate_size": 8192},
    "mistral": _BILLION,
    "olmo2": _BILLION | _DEEP,
    "mixtral": _FEW,
    "qwen3_moe": _FEW | {"moe": {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 384}},
    "deepseek_v3": _FEW
    | _DEEP
    | {
        "mla": {"q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
        | {"v_head_dim": 128},
        "moe": CPU["deepseek_v3"]["moe"] | {"num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 384},
    },
    "gpt_oss": _FEW | {"head_dim": 64, "intermediate_size": 768, "moe": CPU["gpt_oss"]["moe"] | {"num_experts": 32}},
    "mpt": _BILLION | _DEEP | {"intermediate_size": 8192},
}

LABELS = {
    "llama": "Llama",
    "gemma3": "Gemma 3",
    "qwen3": "Qwen3",
    "gpt_neox": "GPT-NeoX",
    "mistral": "Mistral",
    "olmo2": "OLMo 2",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "deepseek_v3": "DeepSeek-V3",
    "gpt_oss": "gpt-oss",
    "mpt": "MPT",
    "gpt2": "GPT-2",
    "qwen2": "Qwen2",
    "gemma2": "Gemma 2",
    "phi3": "Phi-3",
    "granite": "Granite",
    "smollm3": "SmolLM3",
    "starcoder2": "StarCoder2",
    "olmoe": "OLMoE",
    "deepseek_v2": "DeepSeek-V2",
}


def section(family: str, device: str):
    """A `ModelSection`: what a CPU runs, or the same family with a GPU's sizes."""
    from weft.config.model import ModelSection

    keys = {"family": family, "rope_theta": 1e4} | CPU[family]
    if device == "cuda":
        keys |= GPU[family] | ({"sliding_window": 512} if "sliding_window" in keys else {})
    return ModelSection(**keys)


def write_folder(family: str, device: str, folder: Path) -> None:
    """transformers' own model of that config at its own random weights, saved as transformers saves it, in bfloat16."""
    import json

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from weft.models.huggingface_weights import to_config_json

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(to_config_json(section(family, device)) | {"dtype": "bfloat16"}))
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)

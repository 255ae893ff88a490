"""Converts a `model` section to the arguments of Megatron-LM, which its checkpoints contain, and back."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

from weft.config.model import ModelSection
from weft.errors import UserError

_SAME = {
    "hidden_size": "hidden_size", "num_hidden_layers": "num_layers", "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings", "rms_norm_eps": "norm_epsilon", "qk_norm": "qk_layernorm",
    "rope_theta": "rotary_base", "partial_rotary_factor": "rotary_percent", "attention_dropout": "attention_dropout",
    "hidden_dropout": "hidden_dropout", "initializer_range": "init_method_std",
}  # fmt: skip
# Key of `model:` -> value -> value of Megatron's argument.
_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
_POSITIONS = {"rope": "rope", "learned": "learned_absolute"}


def to_arguments(section: ModelSection, vocab_rows: int, multiple: int, dtype: torch.dtype) -> Namespace:
    """Returns the arguments of Megatron-LM for a model that `check_megatron` accepts.

    Args:
        vocab_rows: number of rows of the embedding, with padding.
        multiple: number of which `vocab_rows` is a multiple.
        dtype: dtype of the weights.
    """
    scaling, moe = section.rope_scaling, section.moe
    values = {theirs: getattr(section, ours) for ours, theirs in _SAME.items()} | {
        "ffn_hidden_size": section.inner_width,
        "kv_channels": section.qk_head_dim,
        "group_query_attention": section.kv_heads != section.num_attention_heads,
        "num_query_groups": section.kv_heads,
        "seq_length": section.max_position_embeddings,
        "position_embedding_type": _POSITIONS[section.position],
        "rotary_seq_len_interpolation_factor": scaling.factor if scaling and scaling.rope_type == "linear" else None,
        "use_rope_scaling": bool(scaling and scaling.rope_type == "llama3"),
        "rope_scaling_factor": scaling.factor if scaling and scaling.rope_type == "llama3" else 8.0,
        "normalization": _NORMS[section.norm],
        "swiglu": section.mlp == "gated",
        "squared_relu": section.hidden_act == "relu2",
        "openai_gelu": section.hidden_act == "gelu_tanh",
        "bias_gelu_fusion": False,
        "add_bias_linear": section.mlp_bias,
        "add_qkv_bias": section.attention_bias,
        "untie_embeddings_and_output_weights": not section.tie_word_embeddings,
        "vocab_size": section.vocab_size,
        "padded_vocab_size": vocab_rows,
        "make_vocab_size_divisible_by": multiple,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "iteration": 0,
        "consumed_train_samples": 0,
        "ckpt_format": "torch_dist",
        "use_dist_ckpt": True,
    }
    if moe is not None:
        values |= {
            "num_experts": moe.num_experts,
            "moe_router_topk": moe.num_experts_per_tok,
            "moe_ffn_hidden_size": moe.moe_intermediate_size or section.inner_width,
            "moe_router_pre_softmax": moe.scoring_func == "softmax" and not moe.norm_topk_prob,
            "moe_grouped_gemm": True,
        }
    return Namespace(**values)


def from_arguments(arguments: Mapping[str, Any]) -> ModelSection:
    """Returns the `model` section for the arguments of Megatron-LM, with the family whose models are like it.

    Raises:
        UserError: an argument is missing, or a value is not supported.
    """

    def value(name: str, default: Any = ...) -> Any:
        found = arguments.get(name, default)
        if found is ... or not isinstance(found, bool | int | float | str | type(None)):
            raise UserError(
                f"the argument {name} is missing or has no plain value; give the model's config.json as --config"
            )
        return found

    for name, supported in _only(arguments):
        raise UserError(
            f"the argument {name} is {arguments[name]!r}, which is not supported (supported: {supported!r})"
        )
    keys: dict[str, Any] = {ours: value(theirs, None) for ours, theirs in _SAME.items()}
    keys = {key: found for key, found in keys.items() if found is not None}
    gated, learned = value("swiglu", False), value("position_embedding_type", "learned_absolute") != "rope"
    gelu = "gelu_tanh" if value("openai_gelu", False) or value("bias_gelu_fusion", False) else "gelu"
    bias = value("add_bias_linear", True)
    keys |= {
        "intermediate_size": value("ffn_hidden_size"),
        "head_dim": value("kv_channels"),
        "num_key_value_heads": value("num_query_groups") if value("group_query_attention", False) else None,
        "position": "learned" if learned else "rope",
        "norm": "rmsnorm" if value("normalization", "LayerNorm") == "RMSNorm" else "layernorm",
        "mlp": "gated" if gated else "plain",
        "hidden_act": "silu" if gated else "relu2" if value("squared_relu", False) else gelu,
        "attention_bias": bias or value("add_qkv_bias", False),
        "attention_output_bias": bias,
        "mlp_bias": bias,
        "tie_word_embeddings": not value("untie_embeddings_and_output_weights", False),
        "vocab_size": value("vocab_size", None) or value("padded_vocab_size"),
    }
    if value("use_rope_scaling", False):
        llama3 = {"rope_type": "llama3", "factor": value("rope_scaling_factor", 8.0)}
        keys["rope_scaling"] = llama3 | {"original_max_position_embeddings": 8192}
    elif value("rotary_seq_len_interpolation_factor", None):
        keys["rope_scaling"] = {"rope_type": "linear", "factor": value("rotary_seq_len_interpolation_factor")}
    if value("num_experts", None):
        pre = value("moe_router_pre_softmax", False)
        keys["moe"] = {
            "num_experts": value("num_experts"),
            "num_experts_per_tok": value("moe_router_topk"),
            "moe_intermediate_size": value("moe_ffn_hidden_size", None) or value("ffn_hidden_size"),
            "norm_topk_prob": not pre,
        }
    return ModelSection(**keys, family=_family(keys))


def _only(arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns the arguments that change the computation and have unsupported values, with their supported values."""
    supported = {
        "multi_latent_attention": False, "apply_layernorm_1p": False, "window_size": None, "rotary_interleaved": False,
        "moe_shared_expert_intermediate_size": None, "moe_router_score_function": "softmax", "moe_layer_freq": 1,
        "moe_router_enable_expert_bias": False, "heterogeneous_layers_config_path": None, "mtp_num_layers": None,
        "apply_query_key_layer_scaling": False, "quick_geglu": False, "no_rope_freq": None, "qk_l2_norm": False,
        "softmax_type": "vanilla",
    }  # fmt: skip
    return [(name, one) for name, one in supported.items() if arguments.get(name) not in (None, False, one)]


def _family(keys: Mapping[str, Any]) -> str:
    """Returns the family that has the names of the model's tensors in Hugging Face files."""
    if keys.get("moe"):
        return "qwen3_moe" if keys.get("qk_norm") else "mixtral"
    if keys.get("qk_norm"):
        return "qwen3"
    if keys["norm"] == "layernorm":
        return "gpt2" if keys["position"] == "learned" else "starcoder2"
    return "qwen2" if keys["attention_bias"] and not keys["attention_output_bias"] else "llama"

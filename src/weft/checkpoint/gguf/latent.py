"""Multi-head latent attention in GGUF files: llama.cpp's architecture deepseek2.

llama.cpp multiplies queries with the projection of keys instead of keys (`LatentAttention.absorbed`), so a file has the
rows of `kv_b_proj` for keys, transposed, and those for values as two tensors: `attn_k_b` and `attn_v_b`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from weft.checkpoint.gguf.rope import ATTENTION, FACTOR, attention_factor
from weft.config.model import ModelSection
from weft.config.model_sections import LatentAttentionSection
from weft.errors import UserError
from weft.models.layers.latent import EPS

K_B, V_B = "attn_k_b.weight", "attn_v_b.weight"
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
_KEY, _VALUE, _KEY_MLA, _VALUE_MLA = (
    f"attention.{name}" for name in ("key_length", "value_length", "key_length_mla", "value_length_mla")
)
_HEADS, _GATING = "attention.head_count_kv", "expert_gating_func"
_GROUPS, _GROUPS_USED = "expert_group_count", "expert_group_used_count"
_GATES = {"softmax": 1, "sigmoid": 2}
NUMBERS = (_LOG_MULTIPLIER, _KEY, _VALUE, _KEY_MLA, _VALUE_MLA, _GATING)


def check_latent(section: ModelSection) -> None:
    """Raises UserError if llama.cpp cannot compute the latent attention or the experts of a model."""
    mla, moe = section.mla, section.moe
    if mla is None or moe is None or not moe.n_shared_experts:
        lacking = "mla" if mla is None else "moe" if moe is None else "moe.n_shared_experts"
        raise UserError(f"model.{lacking} is not set, which llama.cpp's architecture deepseek2 needs; use --to hf")
    layers = section.num_hidden_layers
    if mla.q_lora_rank and (layers in (26, 27) or (layers, section.vocab_size) == (48, 128256)):
        raise UserError(
            f"model.mla.q_lora_rank is {mla.q_lora_rank}, but llama.cpp takes a model of {layers} layers for one "
            "without it; use --to hf"
        )
    if moe.n_group > 1 and (moe.scoring_func != "sigmoid" or moe.n_group == moe.num_experts):
        raise UserError(
            f"model.moe.n_group is {moe.n_group}, but llama.cpp ranks groups by their best two experts, as DeepSeek-V3 "
            "does; use --to hf"
        )


def latent_metadata(section: ModelSection, keys: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Adds what the table of keys cannot express to the metadata of a model.

    Args:
        keys: the resolved keys of `section`.
        found: metadata, without the architecture's name.
    """
    mla, moe = section.mla, section.moe
    assert mla is not None
    assert moe is not None
    # The latents and the rotary key are the only key head, and the latents the only value head.
    found |= {_HEADS: 1, _KEY: mla.kv_lora_rank + mla.qk_rope_head_dim, _VALUE: mla.kv_lora_rank}
    found |= {_KEY_MLA: section.qk_head_dim, _VALUE_MLA: mla.v_head_dim, _GATING: _GATES[moe.scoring_func]}
    # llama.cpp reads the size 0 as a projection without latent. A choice among all groups is none.
    found["attention.q_lora_rank"] = mla.q_lora_rank or 0
    if moe.n_group == 1 or moe.topk_group == moe.n_group:
        del found[_GROUPS], found[_GROUPS_USED]
    if (log_multiplier := _log_multiplier(section, keys)) != 0.0:
        # llama.cpp divides by 0.1, and does not multiply the attention factor by 1 + log(factor) / 10 with this key.
        found |= {_LOG_MULTIPLIER: 0.1 * log_multiplier, ATTENTION: attention_factor(section)}


def _log_multiplier(section: ModelSection, keys: Mapping[str, Any]) -> float:
    """Returns the `mscale_all_dim` of YaRN by which llama.cpp computes the attention multiplier; 0: not needed."""
    scaling = section.rope_scaling
    if scaling is None or scaling.rope_type != "yarn" or scaling.factor <= 1:
        return 0.0
    growth = math.sqrt(keys["attention_multiplier"] * math.sqrt(section.qk_head_dim)) / attention_factor(section)
    return 0.0 if abs(growth - 1) < 1e-6 else (growth - 1) / (0.1 * math.log(scaling.factor))


def latent_scale(section: ModelSection, keys: Mapping[str, Any]) -> float:
    """Returns the factor of the dot products of queries and keys in llama.cpp."""
    scaling, base = section.rope_scaling, section.qk_head_dim**-0.5
    if scaling is None:
        return base
    if scaling.rope_type == "linear":  # llama.cpp multiplies by the growth of YaRN here, too
        return base * (1 + 0.1 * math.log(scaling.factor)) ** 2
    growth = 1 + 0.1 * _log_multiplier(section, keys) * math.log(max(scaling.factor, 1.0))
    return base * (attention_factor(section) * growth) ** 2


def read_latent(keys: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Replaces keys of `model:` that were read by the table of keys.

    Args:
        keys: keys of `model:`.
        given: metadata, without the architecture's name.

    Raises:
        UserError: the file has no sizes of latent attention, as those of old converters.
    """
    if missing := [key for key in (_KEY_MLA, _VALUE_MLA, "rope.dimension_count") if key not in given]:
        raise UserError(f"the metadata key deepseek2.{missing[0]} is missing; convert the model again")
    rotary = given["rope.dimension_count"]
    mla, moe = keys.setdefault("mla", {}), keys.setdefault("moe", {})
    mla["q_lora_rank"] = mla.get("q_lora_rank") or None
    mla |= {"qk_rope_head_dim": rotary, "qk_nope_head_dim": given[_KEY_MLA] - rotary, "v_head_dim": given[_VALUE_MLA]}
    keys.pop("num_key_value_heads", None)
    moe.setdefault("norm_topk_prob", False)
    if keys["family"] == "deepseek_v3":
        moe |= {"scoring_func": "sigmoid", "correction_bias": True}


def read_latent_scale(section: ModelSection, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of `model:` that RoPE scaling implies, of a section without them."""
    scaling = section.rope_scaling
    if scaling is None:
        return {}
    logarithm = math.log(max(scaling.factor, 1.0))
    multiplier = given.get(_LOG_MULTIPLIER, 0.0) / 0.1
    found: dict[str, Any] = {}
    if scaling.rope_type == "yarn" and multiplier:
        attention = given.get(ATTENTION, 1.0)
        found["rope_scaling"] = scaling.model_copy(update={"attention_factor": attention})
        section = section.model_copy(update=found)
    base = section.qk_head_dim**-0.5
    if scaling.rope_type == "linear":
        return {"attention_multiplier": base * (1 + 0.1 * math.log(given[FACTOR])) ** 2}
    growth = 1 + 0.1 * multiplier * logarithm
    return found | {"attention_multiplier": base * (attention_factor(section) * growth) ** 2}


def latent_layout(section: ModelSection, name: str, tensor: torch.Tensor, *, back: bool) -> torch.Tensor:
    """Converts a tensor of latent attention between Weft's layout and GGUF's; arguments are as in `tensors.layout`.

    llama.cpp rotates adjacent dimensions. Its norms of latents have the epsilon of the other norms: a latent that is
    multiplied by the square root of the ratio of both epsilons has the same norm.
    """
    mla, module = section.mla, name.split(".")[-2]
    assert mla is not None
    ratio = math.sqrt(section.rms_norm_eps / EPS)
    factor = 1.0 if abs(ratio - 1) < 1e-6 else 1 / ratio if back else ratio
    if module == "q_a_proj":
        return tensor * factor if factor != 1.0 else tensor
    if module == "kv_a_proj":
        latent, rotary = tensor.split((mla.kv_lora_rank, mla.qk_rope_head_dim))
        return torch.cat((latent * factor, _adjacent(mla, rotary, 0, back)))
    if module in ("q_proj", "q_b_proj"):
        heads = tensor.unflatten(0, (section.num_attention_heads, -1))
        plain, rotary = heads.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=1)
        return torch.cat((plain, _adjacent(mla, rotary, 1, back)), dim=1).flatten(0, 1)
    return tensor


def _adjacent(mla: LatentAttentionSection, rows: torch.Tensor, dim: int, back: bool) -> torch.Tensor:
    """Reorders the rows of rotated pairs between the two halves of `dim` and adjacent rows."""
    if mla.rope_interleave:
        return rows
    shape = (-1, 2) if back else (2, -1)
    return rows.unflatten(dim, shape).transpose(dim, dim + 1).flatten(dim, dim + 1)


def stored_part(section: ModelSection, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor that GGUF's tensor `name` has: of `kv_b_proj` the keys, transposed, or the values.

    `attn_k_b` is `[heads, kv_lora_rank, qk_nope_head_dim]`, and `attn_v_b` `[heads, v_head_dim, kv_lora_rank]`.
    """
    if section.mla is None or not name.endswith((K_B, V_B)):
        return tensor
    heads = tensor.unflatten(0, (section.num_attention_heads, -1))
    keys, values = heads.split((section.mla.qk_nope_head_dim, section.mla.v_head_dim), dim=1)
    return keys.transpose(1, 2) if name.endswith(K_B) else values


def joined_parts(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns `kv_b_proj` of `attn_k_b` and `attn_v_b`."""
    return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)

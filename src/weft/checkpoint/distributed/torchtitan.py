"""The layout of torchtitan's models Llama 3 and Qwen3: names as in torchtitan 0.3, one tensor per parameter."""

from __future__ import annotations

import re

from weft.checkpoint.distributed.layout import Chunk, Layout, model_shapes
from weft.checkpoint.distributed.requirements import Requirements
from weft.config.model import ModelSection

# Weft's name of a layer's tensor, without `layers.{n}.` -> torchtitan's.
_LAYER = {
    "attention_norm.weight": "attention_norm.weight",
    "attention.q_proj.weight": "attention.qkv_linear.wq.weight",
    "attention.k_proj.weight": "attention.qkv_linear.wk.weight",
    "attention.v_proj.weight": "attention.qkv_linear.wv.weight",
    "attention.o_proj.weight": "attention.wo.weight",
    "attention.q_norm.weight": "attention.q_norm.weight",
    "attention.k_norm.weight": "attention.k_norm.weight",
    "mlp_norm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.router.weight": "moe.router.gate.weight",
    "mlp.experts.gate_proj": "moe.routed_experts.inner_experts.w1_EFD",
    "mlp.experts.down_proj": "moe.routed_experts.inner_experts.w2_EDF",
    "mlp.experts.up_proj": "moe.routed_experts.inner_experts.w3_EFD",
}
_ENDS = {
    "embed_tokens.weight": "tok_embeddings.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_HEAD = _ENDS["lm_head.weight"]
_ROTARY = ("attention.q_proj.weight", "attention.k_proj.weight")
_REQUIREMENTS = Requirements(
    "torchtitan's {model} model",
    {
        "norm": ("rmsnorm",), "position": ("rope",), "partial_rotary_factor": (1.0,), "mlp": ("gated",),
        "hidden_act": ("silu",), "attention_bias": (False,), "output_bias": (False,), "mlp_bias": (False,),
        "qk_norm_over": ("head",),
    },
    {
        "router_bias": (False,), "expert_bias": (False,), "n_shared_experts": (0,), "scoring_func": ("softmax",),
        "swiglu_limit": (None,), "n_group": (1,), "correction_bias": (False,), "routed_scaling_factor": (1.0,),
    },
)  # fmt: skip


def torchtitan_layout(section: ModelSection) -> Layout:
    """Returns the layout of a model in torchtitan's checkpoints.

    Models with `qk_norm` or experts have the layout of torchtitan's Qwen3, whose rotary embedding is as in Weft. Others
    have the layout of its Llama 3, which rotates adjacent dimensions.

    Raises:
        UserError: neither of torchtitan's models can hold the model.
    """
    qwen = section.qk_norm or section.moe is not None
    model, scalings = ("Qwen3", (None,)) if qwen else ("Llama 3", (None, "llama3"))
    _REQUIREMENTS.check(section, model=model)
    if section.moe is not None:
        _REQUIREMENTS.check_value("qk_norm", section.qk_norm, (True,), model=model)
    scaling = section.rope_scaling and section.rope_scaling.rope_type
    _REQUIREMENTS.check_value("rope_scaling.rope_type", scaling, scalings, model=model)
    heads = (section.num_attention_heads, section.kv_heads)
    chunks = []
    for name in model_shapes(section):
        if name in _ENDS:
            chunks.append(Chunk(_ENDS[name], (name,)))
            continue
        _, layer, inner = name.split(".", 2)
        rotary = 0 if qwen or inner not in _ROTARY else heads[_ROTARY.index(inner)]
        chunks.append(Chunk(f"layers.{layer}.{_LAYER[inner]}", (name,), rotary_heads=rotary))
    if not section.tie_word_embeddings:
        return Layout(section, chunks)
    return Layout(section, [*chunks, Chunk(_HEAD, ("embed_tokens.weight",))], frozenset({_HEAD}))


def model_name(name: str) -> str | None:
    """Returns torchtitan's current name of a model's tensor in a checkpoint; None for other entries, such as optimizer
    state.

    Args:
        name: the name in the checkpoint, which older versions of torchtitan may have written.
    """
    name = name.removeprefix("model.")
    name = {"output.weight": _HEAD}.get(name, name)
    name = re.sub(r"\.attention\.(w[qkv])\.", r".attention.qkv_linear.\1.", name)
    return name if name in _ENDS.values() or name.startswith("layers.") else None

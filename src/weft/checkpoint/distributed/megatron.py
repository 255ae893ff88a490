"""The layout of Megatron-Core's GPTModel in its distributed checkpoints (`torch_dist`).

Layers are stacked along a first dimension. Queries, keys and values are one matrix whose rows alternate by group: the
queries of a group, its key, its value. The MLP's gate and up matrices are one matrix. Norms have the names of
Transformer Engine, which fuses a norm with the linear layer after it.
"""

from __future__ import annotations

from itertools import product

from weft.checkpoint.distributed.layout import Chunk, Layout, model_shapes
from weft.checkpoint.distributed.requirements import Requirements
from weft.config.model import ModelSection

_ATTENTION, _MLP, _EXPERTS = "self_attention.", "mlp.", "mlp.experts.experts."
# Names of Weft's tensors of a layer -> Megatron's name, without `decoder.layers.`. `{}` is weight or bias.
_LAYER: dict[tuple[str, ...], str] = {
    ("attention_norm.{}",): _ATTENTION + "linear_qkv.layer_norm_{}",
    ("attention.q_proj.{}", "attention.k_proj.{}", "attention.v_proj.{}"): _ATTENTION + "linear_qkv.{}",
    ("attention.o_proj.{}",): _ATTENTION + "linear_proj.{}",
    ("attention.q_norm.{}",): _ATTENTION + "q_layernorm.{}",
    ("attention.k_norm.{}",): _ATTENTION + "k_layernorm.{}",
    ("mlp_norm.{}",): _MLP + "linear_fc1.layer_norm_{}",
    ("mlp.gate_proj.{}", "mlp.up_proj.{}"): _MLP + "linear_fc1.{}",
    ("mlp.up_proj.{}",): _MLP + "linear_fc1.{}",
    ("mlp.down_proj.{}",): _MLP + "linear_fc2.{}",
    ("mlp.router.{}",): _MLP + "router.{}",
    ("mlp.experts.gate_proj", "mlp.experts.up_proj"): _EXPERTS + "linear_fc1.weight",
    ("mlp.experts.down_proj",): _EXPERTS + "linear_fc2.weight",
}
_NORM_OF_EXPERTS = "pre_mlp_layernorm.{}"  # with experts, Transformer Engine fuses no norm; the local modules still do
_ENDS = {
    "embed_tokens.weight": "embedding.word_embeddings.weight",
    "embed_positions.weight": "embedding.position_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "norm.bias": "decoder.final_layernorm.bias",
    "lm_head.weight": "output_layer.weight",
}
_PREFIX = "decoder.layers."
_STATES = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
_REQUIREMENTS = Requirements(
    "Megatron-Core's GPTModel",
    {
        "norm": ("rmsnorm", "layernorm"), "norm_bias": (True,), "position": ("rope", "learned"),
        "qk_norm_over": ("head",),
    },
    {
        "router_bias": (False,), "expert_bias": (False,), "n_shared_experts": (0,), "swiglu_limit": (None,),
        "scoring_func": ("softmax", "softmax_of_chosen"), "n_group": (1,), "correction_bias": (False,),
        "routed_scaling_factor": (1.0,),
    },
)  # fmt: skip


def megatron_layout(section: ModelSection, vocab_rows: int | None = None) -> Layout:
    """Returns the layout of a model in Megatron-Core's distributed checkpoints.

    Args:
        vocab_rows: number of rows of the embedding, with padding. Default: the model's `vocab_size`.

    Raises:
        UserError: Megatron-Core's GPTModel cannot compute the model.
    """
    check_megatron(section)
    shapes, layers, chunks, optional = model_shapes(section), section.num_hidden_layers, [], set()
    for name, stored in _ENDS.items():
        if name in shapes:
            vocabulary = name in ("embed_tokens.weight", "lm_head.weight")
            chunks.append(Chunk(stored, (name,), padded_rows=vocab_rows if vocabulary else None))
    table = {
        tuple(source.format(kind) for source in sources): stored.format(kind)
        for sources, stored in _LAYER.items()
        for kind in ("weight", "bias")
    }
    if section.mlp == "gated":
        table = {
            sources: name
            for sources, name in table.items()
            if sources[0] not in ("mlp.up_proj.weight", "mlp.up_proj.bias")
        }
    for layer in range(layers):
        for sources, stored in table.items():
            names = tuple(f"layers.{layer}.{source}" for source in sources)
            if names[0] not in shapes:
                continue
            groups = section.kv_heads if len(names) == 3 else 1
            dim = 1 if sources[0].startswith("mlp.experts.") else 0
            chunks.append(Chunk(_PREFIX + stored, names, layer, layers, dim, groups))
            if section.moe is not None and sources[0].startswith("mlp_norm."):
                copy = _PREFIX + _NORM_OF_EXPERTS.format(sources[0].rpartition(".")[2])
                chunks.append(Chunk(copy, names, layer, layers))
                optional |= {copy, _PREFIX + stored}
    return Layout(section, chunks, frozenset(optional))


def check_megatron(section: ModelSection) -> None:
    """Raises UserError if Megatron-Core's GPTModel cannot compute a model. The message names the key and its value."""
    _REQUIREMENTS.check(section)
    gated = section.mlp == "gated"
    _REQUIREMENTS.check_value("hidden_act", section.hidden_act, ("silu",) if gated else ("gelu", "gelu_tanh", "relu2"))
    _REQUIREMENTS.check_value("attention_output_bias", section.output_bias, (section.mlp_bias,))
    if section.mlp_bias:
        _REQUIREMENTS.check_value("attention_bias", section.attention_bias, (True,))
    scaling = section.rope_scaling
    kind = scaling and scaling.rope_type
    _REQUIREMENTS.check_value("rope_scaling.rope_type", kind, (None, "linear", "llama3"))
    if scaling is not None and kind == "llama3":  # constants in Megatron-Core's code
        for key, value in (
            ("low_freq_factor", 1.0),
            ("high_freq_factor", 4.0),
            ("original_max_position_embeddings", 8192),
        ):
            _REQUIREMENTS.check_value(f"rope_scaling.{key}", getattr(scaling, key), (value,))


def extra_states(section: ModelSection) -> list[str]:
    """Returns the names of the empty objects that Megatron-Core's loader requires beside the tensors."""
    layers, moe = section.num_hidden_layers, section.moe
    modules = _STATES[: 2 if moe is not None else 4]
    found = [f"{_PREFIX}{module}._extra_state/shard_{layer}_{layers}" for module in modules for layer in range(layers)]
    for fc in ("linear_fc1", "linear_fc2") if moe is not None else ():
        for place in product(range(layers), range(moe.num_experts if moe else 0)):
            shard = f"{place[0]}.{place[1]}_{layers}.{moe.num_experts if moe else 0}"
            found.append(f"{_PREFIX}{_EXPERTS}{fc}._extra_state/shard_{shard}")
    return found

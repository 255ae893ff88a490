"""Finds keys of the section `model` that contradict each other, for run files and for config.json files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from weft.config.model import ModelSection
from weft.config.model_sections import ExpertsSection, LatentAttentionSection, RopeScaling
from weft.config.section import partial_section
from weft.config.suggest import did_you_mean
from weft.families import families
from weft.plugins import unknown_kind_hint


class ModelMistake(NamedTuple):
    """An error at a key of the section `model`.

    Attributes:
        key: the key, without `model.`.
        what: the message.
        also: other keys that the error depends on. If no line sets `key`, the error is reported at a line that sets one
            of these keys. If one of these keys has an error of its own, this error is not reported.
    """

    key: str
    what: str
    also: tuple[str, ...] = ()


def known_model(get: Callable[[str], Any]) -> ModelSection:
    """Returns the `model` section of a decoder with the values that are known.

    Any other key has its default, or None if the key is required.

    Args:
        get: returns a checked value by its dotted key; None if the key is not set, or has a problem.
    """
    parts = {"moe": ExpertsSection, "mla": LatentAttentionSection, "rope_scaling": RopeScaling}
    needed = {"moe": "num_experts", "mla": "kv_lora_rank", "rope_scaling": "rope_type"}
    stated = {name: get(f"model.{name}.{needed[name]}") is not None for name in parts}
    found = {name: partial_section(kind, get, f"model.{name}") for name, kind in parts.items() if stated[name]}
    return partial_section(ModelSection, get, "model", **(dict.fromkeys(parts) | found))


def model_mistakes(model: ModelSection) -> Iterator[ModelMistake]:
    """Yields an error for each contradiction between keys. A rule is skipped if one of its values is None."""
    if model.family not in families():
        near = did_you_mean(model.family, families())
        hint = f"{near} (`weft models` lists them all)" if near else f"; choose one of {', '.join(families())}"
        yield ModelMistake("family", f"unknown family {model.family!r}{hint}{unknown_kind_hint(str(model.family))}")
    yield from _heads(model)
    if model.num_labels and model.num_nextn_predict_layers:
        what = "a reward model has no head for multi-token prediction layers; set 0, or remove model.num_labels"
        yield ModelMistake("num_nextn_predict_layers", what, ("num_labels",))
    yield from _layers(model)
    yield from _rotary(model)
    if model.moe is not None:
        yield from _experts(model, model.moe)
    if model.mla is not None:
        for name in ("head_dim", "num_key_value_heads", "qk_norm", "clip_qkv"):
            given = getattr(model, name)
            if given and not (name == "num_key_value_heads" and given == model.num_attention_heads):
                yield ModelMistake(name, "latent attention (model.mla) does not use this key; remove the key", ("mla",))
    row, rows = model.pad_token_id, model.vocab_size
    if row is not None and rows is not None and row >= rows:
        what = f"{row}, but the embedding has rows 0 to {rows - 1} (model.vocab_size {rows}); remove the key"
        yield ModelMistake("pad_token_id", what, ("vocab_size",))


def _heads(model: ModelSection) -> Iterator[ModelMistake]:
    heads, hidden, groups = model.num_attention_heads, model.hidden_size, model.num_key_value_heads
    head = model.head_dim
    if not heads or not hidden or model.mla is not None:
        return
    if head is None and hidden % heads:
        what = f"{heads} heads do not divide hidden_size {hidden}"
        remedy = f"choose {_divisor_near(hidden, heads)} heads, or set head_dim"
        yield ModelMistake("num_attention_heads", f"{what}; {remedy}", ("hidden_size",))
    elif model.position == "rope" and (head or hidden // heads) % 2:
        what = f"rotary embeddings need an even head size, not {head or hidden // heads}; set an even head_dim"
        yield ModelMistake("head_dim", what, ("num_attention_heads", "hidden_size"))
    if groups and heads % groups:
        what = f"{groups} key/value heads do not divide {heads} attention heads; choose {_divisor_near(heads, groups)}"
        yield ModelMistake("num_key_value_heads", what, ("num_attention_heads",))


def _divisor_near(number: int, near: int) -> int:
    """Returns the divisor of `number`, other than `near`, that is closest to `near`.

    Returns 1 if no such divisor differs from `near` by at most 4095.
    """
    for distance in range(1, 4096):
        for divisor in (near - distance, near + distance):
            if 0 < divisor <= number and number % divisor == 0:
                return divisor
    return 1


def _layers(model: ModelSection) -> Iterator[ModelMistake]:
    layers = model.num_hidden_layers
    for name in ("layer_types", "no_rope_layers"):
        given = getattr(model, name)
        if given is not None and layers is not None and len(given) != layers:
            what = f"{len(given)} entries for {layers} layers; list one entry per layer"
            yield ModelMistake(name, what, ("num_hidden_layers",))
    if model.sliding_window is None:
        slides = "sliding_attention" in (model.layer_types or [])
        for name, needs_size in (("layer_types", slides), ("sliding_window_pattern", True)):
            if needs_size and getattr(model, name) is not None:
                what = "the sliding window has no size; set model.sliding_window"
                yield ModelMistake(name, what, ("sliding_window",))


def _rotary(model: ModelSection) -> Iterator[ModelMistake]:
    if model.mla is None and not (model.head_dim or (model.hidden_size and model.num_attention_heads)):
        return
    if model.mla is not None and model.mla.qk_rope_head_dim is None:
        return
    rotated = model.rotary_dim
    if model.position == "rope" and model.partial_rotary_factor < 1 and (rotated < 2 or rotated % 2):
        what = (
            f"rotary embeddings need an even number of rotated dimensions per head, not {rotated}; change the fraction"
        )
        yield ModelMistake("partial_rotary_factor", what)
    mistake = model.rope_scaling and model.rope_scaling.mistake(rotated)
    if mistake:
        yield ModelMistake("rope_scaling", mistake)


def _experts(model: ModelSection, moe: ExpertsSection) -> Iterator[ModelMistake]:
    experts, each, groups, kept = moe.num_experts, moe.num_experts_per_tok, moe.n_group, moe.topk_group
    if each is None:
        return
    if model.mlp == "plain":
        yield ModelMistake("mlp", "plain, but experts are always gated; remove the key, or remove model.moe", ("moe",))
    layers, dense = model.num_hidden_layers, moe.first_k_dense_replace
    far = [layer for layer in moe.mlp_only_layers or [] if layers is not None and not 0 <= layer < layers]
    if far:
        what = f"{far[0]} is not a layer of the model; use numbers from 0 to {layers - 1}"
        yield ModelMistake("moe.mlp_only_layers", what, ("num_hidden_layers",))
    elif layers is not None and dense is not None and dense >= layers:
        what = f"{dense} of {layers} layers have an MLP, so no layer has experts; lower the number, or remove model.moe"
        yield ModelMistake("moe.first_k_dense_replace", what, ("num_hidden_layers",))
    also = ("moe.num_experts_per_tok",)
    if each > experts:
        yield ModelMistake(
            "moe.num_experts_per_tok", f"{each}, but the model has {experts} experts; set at most {experts}"
        )
    elif groups and kept and groups > 1:
        if experts % groups:
            what = f"{groups} groups do not divide {experts} experts; change n_group or num_experts"
            yield ModelMistake("moe.n_group", what, also)
        elif kept > groups:
            yield ModelMistake(
                "moe.topk_group", f"{kept}, but the model has {groups} groups of experts; set at most {groups}", also
            )
        elif each > experts // groups * kept:
            size = experts // groups
            what = f"{kept} groups of {size} experts have fewer than {each} experts per token; raise topk_group"
            yield ModelMistake("moe.topk_group", what, also)

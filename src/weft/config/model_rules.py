"""What must hold between the keys of `model:`, whether a file of a run's states them or a config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from weft.config.model import ModelSection, RopeScaling
from weft.config.moe import ExpertsSection, LatentAttentionSection
from weft.config.section import known_section
from weft.config.suggest import did_you_mean
from weft.families import families
from weft.plugins import unknown_kind_hint


class Mistake(NamedTuple):
    """A key of `model:`, what is wrong with it, and other keys that it may be told at."""

    key: str
    what: str
    also: tuple[str, ...] = ()


def known_model(get: Callable[[str], Any]) -> ModelSection:
    """The decoder of a run's values as far as they are known: of other keys the default, or None.

    Args:
        get: a value by its dotted key; None: not set, or it has a problem.
    """
    parts = {"moe": ExpertsSection, "mla": LatentAttentionSection, "rope_scaling": RopeScaling}
    needed = {"moe": "num_experts", "mla": "kv_lora_rank", "rope_scaling": "rope_type"}
    stated = {name: get(f"model.{name}.{needed[name]}") is not None for name in parts}
    found = {name: known_section(kind, get, f"model.{name}") for name, kind in parts.items() if stated[name]}
    return known_section(ModelSection, get, "model", **(dict.fromkeys(parts) | found))


def mistakes(model: ModelSection) -> Iterator[Mistake]:
    """All that does not fit together; a rule one of whose numbers is None says nothing."""
    if model.family not in families():
        near = did_you_mean(model.family, families())
        hint = f"{near} (`weft models` lists them all)" if near else f"; choose one (there are {', '.join(families())})"
        yield Mistake("family", f"there is no family {model.family!r}{hint}{unknown_kind_hint(str(model.family))}")
    yield from _heads(model)
    yield from _layers(model)
    yield from _rotations(model)
    if model.moe is not None:
        yield from _experts(model, model.moe)
    if model.mla is not None:
        for name in ("head_dim", "num_key_value_heads", "qk_norm", "clip_qkv"):
            given = getattr(model, name)
            if given and not (name == "num_key_value_heads" and given == model.num_attention_heads):
                yield Mistake(name, "latent attention (model.mla) has none; remove the key", ("mla",))
    row, rows = model.pad_token_id, model.vocab_size
    if row is not None and rows is not None and row >= rows:
        what = f"{row}, and the embedding has rows 0 to {rows - 1} (model.vocab_size {rows}); remove the key"
        yield Mistake("pad_token_id", what, ("vocab_size",))


def _heads(model: ModelSection) -> Iterator[Mistake]:
    heads, width, groups, head = model.num_attention_heads, model.hidden_size, model.num_key_value_heads, model.head_dim
    if not heads or not width or model.mla is not None:
        return
    if head is None and width % heads:
        what = f"{heads} heads do not divide the width: hidden_size {width} is no multiple of it; "
        what += f"choose {_divisor_near(width, heads)} heads, or set head_dim"
        yield Mistake("num_attention_heads", what, ("hidden_size",))
    elif model.position == "rope" and (head or width // heads) % 2:
        what = f"rotary positions turn pairs, and a head has {head or width // heads} dimensions; make it even"
        yield Mistake("head_dim", what, ("num_attention_heads", "hidden_size"))
    if groups and heads % groups:
        what = f"{groups} key-value heads do not divide {heads} attention heads; choose {_divisor_near(heads, groups)}"
        yield Mistake("num_key_value_heads", what, ("num_attention_heads",))


def _divisor_near(number: int, wanted: int) -> int:
    """The divisor next to `wanted`; 1 if none is near."""
    for distance in range(1, 4096):
        for divisor in (wanted - distance, wanted + distance):
            if 0 < divisor <= number and number % divisor == 0:
                return divisor
    return 1


def _layers(model: ModelSection) -> Iterator[Mistake]:
    layers = model.num_hidden_layers
    for name in ("layer_types", "no_rope_layers"):
        given = getattr(model, name)
        if given is not None and layers is not None and len(given) != layers:
            yield Mistake(name, f"{len(given)} entries for {layers} layers; give one each", ("num_hidden_layers",))
    if model.sliding_window is None:
        slides = "sliding_attention" in (model.layer_types or [])
        for name, said in (("layer_types", slides), ("sliding_window_pattern", True)):
            if said and getattr(model, name) is not None:
                yield Mistake(name, "how many tokens does the sliding window have? set model.sliding_window")


def _rotations(model: ModelSection) -> Iterator[Mistake]:
    if model.mla is None and not (model.head_dim or (model.hidden_size and model.num_attention_heads)):
        return
    if model.mla is not None and model.mla.qk_rope_head_dim is None:
        return
    rotated = model.rotary_dim
    if model.position == "rope" and model.partial_rotary_factor < 1 and (rotated < 2 or rotated % 2):
        what = f"rotary positions turn pairs, and {rotated} of each head's dimensions are rotated; make them even"
        yield Mistake("partial_rotary_factor", what)
    unfit = model.rope_scaling and model.rope_scaling.unfit(rotated)
    if unfit:
        yield Mistake("rope_scaling", f"{unfit}; set it")


def _experts(model: ModelSection, moe: ExpertsSection) -> Iterator[Mistake]:
    experts, each, groups, kept = moe.num_experts, moe.num_experts_per_tok, moe.n_group, moe.topk_group
    if each is None:
        return
    if model.mlp == "plain":
        yield Mistake("mlp", "experts are gated; remove the key, or model.moe", ("moe",))
    layers, dense = model.num_hidden_layers, moe.first_k_dense_replace
    far = [layer for layer in moe.mlp_only_layers or [] if layers is not None and not 0 <= layer < layers]
    if far:
        what = f"there is no layer {far[0]}; they are counted from 0 to {layers - 1}"
        yield Mistake("moe.mlp_only_layers", what, ("num_hidden_layers",))
    elif layers is not None and dense is not None and dense >= layers:
        what = f"{dense} of {layers} layers have an MLP, so none has experts; lower it, or remove model.moe"
        yield Mistake("moe.first_k_dense_replace", what, ("num_hidden_layers",))
    also = ("moe.num_experts_per_tok",)
    if each > experts:
        yield Mistake("moe.num_experts_per_tok", f"{each} of {experts} experts; choose at most {experts}")
    elif groups and kept and groups > 1:
        if experts % groups:
            what = f"{experts} experts are no multiple of {groups} groups; change one"
            yield Mistake("moe.n_group", what, also)
        elif kept > groups:
            yield Mistake("moe.topk_group", f"{kept} of {groups} groups; choose at most {groups}", also)
        elif each > experts // groups * kept:
            what = f"{kept} groups of {experts // groups} experts have no {each} to choose; raise topk_group"
            yield Mistake("moe.topk_group", what, also)

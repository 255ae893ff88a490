"""Checks the decoder's components: the signatures of custom classes, and whether the components work together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from weft.config.components import find_component
from weft.config.draft import Draft
from weft.config.model import ModelSection
from weft.config.section import CustomClass
from weft.errors import UserError

# Keys of `model` that accept `module:Class` -> kind of the component.
CUSTOM_COMPONENT_KEYS = {
    name: bound.kind
    for name, info in ModelSection.model_fields.items()
    for branch in get_args(info.annotation)
    for bound in get_args(branch)
    if isinstance(bound, CustomClass)
}


def check_components(draft: Draft) -> None:
    """Reports custom classes whose arguments do not match the call, and components that do not work together.

    Reads the source of custom classes; does not import them.
    """
    for name, kind in CUSTOM_COMPONENT_KEYS.items():
        chosen = draft.get(f"model.{name}")
        if isinstance(chosen, str) and ":" in chosen:
            _check_class(draft, f"model.{name}", chosen, kind)
    _check_attention(draft)
    _check_bias(draft)
    pattern = draft.get("model.attention_pattern")
    if pattern is None:
        return
    if draft.get("model.sliding_window") is not None:
        what = "a sparse attention pattern replaces the sliding window; remove one of the two keys"
        draft.report("model.sliding_window", what, "model.attention_pattern")
    stride, last = pattern.get("stride"), pattern.get("expressivity")
    if pattern["type"] == "fixed" and last > stride:
        what = f"{last} is more than the {stride} tokens of a block (stride); set at most {stride}"
        draft.report("model.attention_pattern.expressivity", what, "model.attention_pattern.stride")


def _check_bias(draft: Draft) -> None:
    """Reports a maximum exponent of slopes without ALiBi, unless it is the default: the run directory has all keys."""
    key, position = "model.alibi_bias_max", draft.get("model.position")
    written, default = draft.tree.get(*key.split(".")), ModelSection.model_fields["alibi_bias_max"].default
    if written is None or written.origin is not None or position in (None, "alibi") or ":" in position:
        return
    if draft.get(key) not in (None, default):
        what = f"no effect, because model.position is {position}; remove the key, or set model.position: alibi"
        draft.report(key, what)


def _check_class(draft: Draft, key: str, chosen: str, kind: str) -> None:
    try:
        found = find_component(chosen, kind)
    except UserError as error:
        draft.report(key, error.what)
        return
    required = [name for name, argument in found.arguments.items() if argument.required]
    if required:
        given = ", ".join(found.injected) or "no arguments"
        what = f"{chosen!r}: {found.name} requires {', '.join(required)}, but Weft passes {given}"
        draft.report(key, f"{what}; give all other arguments defaults")


def _check_attention(draft: Draft) -> None:
    key, chosen = "model.attention_implementation", draft.get("model.attention_implementation")
    if not isinstance(chosen, str) or chosen in ("auto", "sdpa"):
        return
    custom = ":" in chosen
    if draft.get("model.attention_sinks") and (custom or chosen == "flash"):
        what = (
            f"{'a custom class' if custom else 'flash-attn'} does not support attention sinks; remove the key, "
            f"or set {key}: auto"
        )
        draft.report("model.attention_sinks", what, key)
    if chosen == "flash" and draft.get("model.attention_pattern") is not None:
        what = "flash-attn supports no sparse pattern; set model.sliding_window instead, or set flex"
        draft.report(key, what, "model.attention_pattern")
    if chosen == "flash" and draft.get("training.dtype") in ("float32", "float64"):
        what = f"flash-attn computes in 16 bits; set training.dtype: bfloat16, or {key}: auto"
        draft.report("training.dtype", what, key)
    if chosen == "flex" and draft.get("model.attention_dropout"):
        what = f"flex attention does not support dropout; remove the key, or set {key}: sdpa"
        draft.report("model.attention_dropout", what, key)


def custom_types(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields (key, type) of every custom component in a config: `type: module:Class`, or a component of the model.

    Args:
        tree: the config as plain data, or a section of it.
        key: dotted key of `tree`; "" for the full config.
    """
    if isinstance(tree, Mapping):
        if ":" in str(tree.get("type", "")):
            yield key, tree["type"]
        for name, value in tree.items():
            if key == "model" and name in CUSTOM_COMPONENT_KEYS and ":" in str(value):
                yield f"model.{name}", value
            yield from custom_types(value, f"{key}.{name}" if key else name)
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from custom_types(value, f"{key}[{number}]")

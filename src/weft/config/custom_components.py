"""Rules of a decoder's exchangeable parts: classes of the user's own, and what goes with which implementation."""

from __future__ import annotations

from typing import get_args

from weft.config.components import find_part
from weft.config.draft import Draft
from weft.config.model import ModelSection
from weft.config.section import Own
from weft.errors import UserError

# Keys that take `module:Class`, and which kind of part that is.
OWN_PARTS = {
    name: own.kind
    for name, info in ModelSection.model_fields.items()
    for branch in get_args(info.annotation)
    for own in get_args(branch)
    if isinstance(own, Own)
}


def check_parts(draft: Draft) -> None:
    """Look for the user's own classes, which are read but not imported, and for parts that cannot go together."""
    for name, room in OWN_PARTS.items():
        chosen = draft.get(f"model.{name}")
        if isinstance(chosen, str) and ":" in chosen:
            _own(draft, f"model.{name}", chosen, room)
    _implementation(draft)
    pattern = draft.get("model.attention_pattern")
    if pattern is None:
        return
    if draft.get("model.sliding_window") is not None:
        what = "a sparse pattern takes the place of the sliding window; remove one of them"
        draft.problem("model.sliding_window", what, "model.attention_pattern")
    stride, last = pattern.get("stride"), pattern.get("expressivity")
    if pattern["type"] == "fixed" and last > stride:
        what = f"{last} tokens of blocks of {stride}; choose at most {stride}"
        draft.problem("model.attention_pattern.expressivity", what, "model.attention_pattern.stride")


def _own(draft: Draft, key: str, chosen: str, room: str) -> None:
    try:
        part = find_part(chosen, room)
    except UserError as error:
        draft.problem(key, error.what)
        return
    needed = [name for name, argument in part.arguments.items() if argument.required]
    if needed:
        given = f"Weft gives it {', '.join(part.injected)}" if part.injected else "Weft makes it without arguments"
        what = f"{chosen!r}: {part.name} wants {', '.join(needed)}, and {given}; give what is more a default"
        draft.problem(key, what)


def _implementation(draft: Draft) -> None:
    key, chosen = "model.attention_implementation", draft.get("model.attention_implementation")
    if not isinstance(chosen, str) or chosen in ("auto", "sdpa"):
        return
    own = ":" in chosen
    if draft.get("model.attention_sinks") and (own or chosen == "flash"):
        what = f"{'a class of your own' if own else 'flash-attn'} knows none; remove the key, or set {key}: auto"
        draft.problem("model.attention_sinks", what, key)
    if chosen == "flash" and draft.get("model.attention_pattern") is not None:
        what = "flash-attn's kernels know no sparse patterns but model.sliding_window; set it, or choose flex"
        draft.problem(key, what, "model.attention_pattern")
    if chosen == "flash" and draft.get("training.dtype") in ("float32", "float64"):
        what = f"flash-attn computes in 16 bits; set training.dtype: bfloat16, or {key}: auto"
        draft.problem("training.dtype", what, key)
    if chosen == "flex" and draft.get("model.attention_dropout"):
        what = "flex attention drops no weights; remove it, or choose sdpa"
        draft.problem("model.attention_dropout", what, key)

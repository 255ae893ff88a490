"""What config.json says about rotations, in all spellings, with the precedence that transformers 5 has. Torch-free."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from weft.errors import UserError
from weft.families.json_values import bounded, mapping, number, whole

_ORIGINAL = "original_max_position_embeddings"
# The keys of each kind of scaling, beside rope_type.
_SCALING = {
    "linear": ("factor",),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor", _ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate",
    ),
    "dynamic": ("factor",),
    "longrope": ("factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"),
}  # fmt: skip
_LISTS = ("short_factor", "long_factor")
# Those of them without which transformers refuses it too.
_NEEDED = {
    "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": (),
    "dynamic": ("factor",), "longrope": _LISTS,
}  # fmt: skip


def rope_mapping(config: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping that counts: the older `rope_scaling`, which model cards tell people to add, before the newer one.

    Raises:
        UserError: one of them is no mapping.
    """
    newer = mapping(config, "rope_parameters")
    return mapping(config, "rope_scaling") or newer


def read_rope(
    config: Mapping[str, Any], defaults: Mapping[str, Any], *, partial: float | None = None
) -> dict[str, Any]:
    """Keys of `model:` about rotations, from transformers 5's `rope_parameters` or the older separate keys.

    Args:
        defaults: the family's, with its `rope_theta`.
        partial: the share of a head that is rotated where config.json does not say, of a family whose class rotates a
            part only; None: its class rotates the whole head, whatever is said.

    Raises:
        UserError: what is said has no meaning, or one that there is no code for.
    """
    given = rope_mapping(config)
    if any(isinstance(given.get(key), dict) for key in ("full_attention", "sliding_attention")):
        raise UserError("rope_parameters: this family has no other rotations for some of its layers than for the rest")
    base = given if "rope_theta" in given else {"rope_theta": defaults["rope_theta"]} | dict(config)
    found: dict[str, Any] = {"rope_theta": float(number(base, "rope_theta", 1.0))}
    kind, key = rope_type(given), "partial_rotary_factor"
    stated = given if key in given else config
    share = 1.0 if partial is None and stated.get(key) is None else number(stated, key, partial or 1.0)
    if partial is not None and share != 1.0:
        found[key] = share
    if kind == "default":
        return found
    if partial is None and share != 1.0:
        raise UserError(f"{key}: {share!r} beside stretched rotations is nothing that this family's code can do")
    if kind == "yarn" and found["rope_theta"] == 1.0:
        raise UserError("rope_theta: 1 beside a rope_type of 'yarn': all rotations would be the same one")
    found["rope_scaling"] = {"rope_type": kind, **_read_scaling(config, given, kind, defaults)}
    return found


def rope_type(given: Mapping[str, Any]) -> str:
    """What kind of rotations a mapping names. Raises UserError."""
    kind = given["rope_type"] if "rope_type" in given else given.get("type", "default")
    if not isinstance(kind, str) or kind not in ("default", *_SCALING):
        raise UserError(
            f"rope_scaling: rope_type {reprlib.repr(kind)} is not supported; there are {', '.join(_SCALING)}"
        )
    return kind


def _read_scaling(
    config: Mapping[str, Any], given: Mapping[str, Any], kind: str, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The keys of `RopeScaling` beside rope_type."""
    longest = whole(config, "max_position_embeddings", defaults["max_position_embeddings"])
    scaling: dict[str, Any] = {}
    for key in _SCALING[kind]:
        if given.get(key) is not None:
            scaling[key] = bounded(given[key], f"rope_scaling.{key}")
        elif key in _NEEDED[kind]:
            said = f"{key}, a list of numbers" if key in _LISTS else key
            raise UserError(f"rope_scaling: a rope_type of {kind!r} needs {said}")
        elif key == "truncate" and key in given:
            scaling[key] = False  # as transformers takes null
    if kind == "dynamic":  # transformers stretches from there on, whatever else is stated
        scaling[_ORIGINAL] = longest
    elif kind != "linear":  # as in transformers, what stands beside the mapping comes before what stands in it
        beside = {key: known[key] for known in (defaults, config) for key in [_ORIGINAL] if key in known}
        scaling[_ORIGINAL] = whole(beside or given, _ORIGINAL, longest)
    if "factor" not in scaling:
        scaling["factor"] = longest / scaling[_ORIGINAL]
    number({"rope_scaling.factor": scaling["factor"]}, "rope_scaling.factor", 1.0)  # which families compute with
    for key in _LISTS:
        if isinstance(scaling.get(key), list):
            scaling[key] = [float(number({key: factor}, key, 1.0)) for factor in scaling[key]]
    return scaling


def write_rope(keys: dict[str, Any]) -> dict[str, Any]:
    """The same back, in both spellings: `rope_parameters` for transformers 5, the others for what is older."""
    scaling = {"rope_type": "default"}
    if keys["rope_scaling"] is not None:
        stated = keys["rope_scaling"]
        kind = stated["rope_type"]
        scaling = {"rope_type": kind} | {key: stated[key] for key in _SCALING[kind] if stated[key] is not None}
    written: dict[str, Any] = {"rope_theta": keys["rope_theta"]}
    if keys["rope_scaling"] is not None:
        written["rope_scaling"] = dict(scaling)
    scaling["rope_theta"] = keys["rope_theta"]
    if keys["partial_rotary_factor"] != 1.0:
        scaling["partial_rotary_factor"] = written["partial_rotary_factor"] = keys["partial_rotary_factor"]
    return {**written, "rope_parameters": scaling}

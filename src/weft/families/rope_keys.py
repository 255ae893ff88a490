"""Reads and writes the rotary embedding's keys in config.json. Does not import torch.

If several keys in a config.json set the same value, the key that Transformers 5 prefers takes precedence.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from weft.errors import UserError
from weft.families.json_values import bounded, integer, mapping, number

_ORIGINAL = "original_max_position_embeddings"
# The keys of each rope_type, except rope_type itself.
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
# The keys that a rope_type requires, as in Transformers.
_REQUIRED = {
    "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": (),
    "dynamic": ("factor",), "longrope": _LISTS,
}  # fmt: skip


def rope_mapping(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the value of `rope_scaling` or, if this key is missing or empty, of `rope_parameters`.

    `rope_scaling` is the older key, which model cards ask users to add.

    Raises:
        UserError: one of the two values is not a mapping.
    """
    newer = mapping(config, "rope_parameters")
    return mapping(config, "rope_scaling") or newer


def read_rope(
    config: Mapping[str, Any], defaults: Mapping[str, Any], *, partial: float | None = None
) -> dict[str, Any]:
    """Reads keys of `model:` from Transformers 5's `rope_parameters`, or the older separate keys.

    Args:
        config: a config.json.
        defaults: default values of the family's config.json keys, including `rope_theta`.
        partial: the family's default of `partial_rotary_factor`; None: the Transformers class ignores this key.

    Raises:
        UserError: a value is invalid or not supported.
    """
    given = rope_mapping(config)
    if any(isinstance(given.get(key), dict) for key in ("full_attention", "sliding_attention")):
        raise UserError("rope_parameters: this family does not support separate values per layer type; use one mapping")
    base = given if "rope_theta" in given else {"rope_theta": defaults["rope_theta"]} | dict(config)
    found: dict[str, Any] = {"rope_theta": float(number(base, "rope_theta", 1.0))}
    kind, key = rope_type(given), "partial_rotary_factor"
    stated = given if key in given else config
    factor = 1.0 if partial is None and stated.get(key) is None else number(stated, key, partial or 1.0)
    if partial is not None and factor != 1.0:
        found[key] = factor
    if kind == "default":
        return found
    if partial is None and factor != 1.0:
        raise UserError(f"{key}: {factor!r} with a rope_type of {kind!r} is not supported for this family; set it to 1")
    if kind == "yarn" and found["rope_theta"] == 1.0:
        raise UserError("rope_theta: 1 gives all dimensions the same frequency; rope_type 'yarn' needs a value above 1")
    found["rope_scaling"] = {"rope_type": kind, **_read_scaling(config, given, kind, defaults)}
    return found


def rope_type(given: Mapping[str, Any]) -> str:
    """Returns the value of `rope_type` or of the older key `type`. Raises UserError if the value is unknown.

    Args:
        given: the value of `rope_scaling` or `rope_parameters`.
    """
    kind = given["rope_type"] if "rope_type" in given else given.get("type", "default")
    if not isinstance(kind, str) or kind not in ("default", *_SCALING):
        raise UserError(
            f"rope_scaling: rope_type {reprlib.repr(kind)} is not supported; use one of {', '.join(_SCALING)}"
        )
    return kind


def _read_scaling(
    config: Mapping[str, Any], given: Mapping[str, Any], kind: str, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the keys of `rope_scaling` in the `model:` section, except `rope_type`.

    Args:
        config: a config.json.
        given: the value of `rope_scaling` or `rope_parameters` in it.
        kind: the rope type.
        defaults: default values of the family's config.json keys.
    """
    max_positions = integer(config, "max_position_embeddings", defaults["max_position_embeddings"])
    scaling: dict[str, Any] = {}
    for key in _SCALING[kind]:
        if given.get(key) is not None:
            scaling[key] = bounded(given[key], f"rope_scaling.{key}")
        elif key in _REQUIRED[kind]:
            needed = f"{key}, a list of numbers" if key in _LISTS else key
            raise UserError(f"rope_scaling: a rope_type of {kind!r} needs {needed}")
        elif key == "truncate" and key in given:
            scaling[key] = False  # null, as in Transformers
    if kind == "dynamic":  # Transformers scales from this length on, whatever the other keys are
        scaling[_ORIGINAL] = max_positions
    elif kind != "linear":  # as in Transformers, the top-level key precedes the mapping's
        top_level = {key: known[key] for known in (defaults, config) for key in [_ORIGINAL] if key in known}
        scaling[_ORIGINAL] = integer(top_level or given, _ORIGINAL, max_positions)
    if "factor" not in scaling:
        scaling["factor"] = max_positions / scaling[_ORIGINAL]
    number({"rope_scaling.factor": scaling["factor"]}, "rope_scaling.factor", 1.0)  # families compute with this factor
    for key in _LISTS:
        if isinstance(scaling.get(key), list):
            scaling[key] = [float(number({key: factor}, key, 1.0)) for factor in scaling[key]]
    return scaling


def write_rope(keys: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json keys of the rotary embedding: Transformers 5's `rope_parameters`, and the older keys."""
    written: dict[str, Any] = {"rope_theta": keys["rope_theta"]}
    parameters: dict[str, Any] = {"rope_type": "default"}
    if (scaling := keys["rope_scaling"]) is not None:
        kind = scaling["rope_type"]
        parameters = {"rope_type": kind} | {key: scaling[key] for key in _SCALING[kind] if scaling[key] is not None}
        written["rope_scaling"] = dict(parameters)
    parameters["rope_theta"] = keys["rope_theta"]
    if keys["partial_rotary_factor"] != 1.0:
        parameters["partial_rotary_factor"] = written["partial_rotary_factor"] = keys["partial_rotary_factor"]
    return {**written, "rope_parameters": parameters}

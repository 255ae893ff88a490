"""What stands under a key of a config.json, checked by its type before anything is made of it. Torch-free."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from weft.errors import UserError

# No model comes near these; beyond them PyTorch's sizes, and lists with an entry a layer, would overflow.
LARGEST_WHOLE, _LARGEST = 2**31 - 1, 1e38


def bounded(value: Any, key: str, most: int = LARGEST_WHOLE) -> Any:
    """A value whose numbers are none too large, and none infinite or NaN. Raises UserError."""
    for one in value if isinstance(value, list) else [value]:
        limit = most if type(one) is int else _LARGEST
        if isinstance(one, int | float) and not -limit <= one <= limit:
            raise UserError(f"{key}: {reprlib.repr(one)} is too large for a model; at most {limit:,}")
    return value


def whole(config: Mapping[str, Any], key: str, default: int, least: int = 1) -> int:
    """A key's whole number, or the default where there is none. Raises UserError."""
    value = config.get(key, default)
    if type(value) is not int or value < least:
        raise UserError(f"{key}: {reprlib.repr(value)} is no whole number of at least {least}")
    return bounded(value, key)


def number(config: Mapping[str, Any], key: str, default: float) -> float:
    """A key's number, or the default where there is none. Raises UserError for what is no number above 0."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UserError(f"{key}: {reprlib.repr(value)} is no number above 0")
    return bounded(value, key)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """A key's true or false, or the default where there is none. Raises UserError."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise UserError(f"{key}: {reprlib.repr(value)} is neither true nor false")
    return value


def mapping(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A key's mapping, an empty one for none and null. Raises UserError."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{key}: must be a mapping, not {reprlib.repr(value)}")
    return value or {}


def layer_types(config: Mapping[str, Any], layers: int) -> list[str] | None:
    """`layer_types`, None if config.json has none. Raises UserError unless it has one of the two kinds a layer."""
    types = config.get("layer_types")
    if types is None:
        return None
    names = types if isinstance(types, list) and all(isinstance(one, str) for one in types) else None
    if names is None or len(names) != layers or set(names) - {"full_attention", "sliding_attention"}:
        kinds = ", ".join(sorted(set(names))[:5]) if names else ""
        said = reprlib.repr(types) if names is None else f"{len(names)} layers of {kinds or 'no kind'}"
        raise UserError(
            f"layer_types: {said}; it must have one of full_attention and sliding_attention for each of the "
            f"{layers} layers"
        )
    return names

"""Reads and checks single values of a config.json. Does not import torch.

The argument `default` is the value that is returned for a missing key.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from weft.errors import UserError

# Limits far above any model. Larger values would overflow PyTorch's sizes, and lists with an entry per layer.
MAX_INTEGER, _MAX_FLOAT = 2**31 - 1, 1e38


def bounded(value: Any, key: str, most: int = MAX_INTEGER) -> Any:
    """Checks `value` if it is a number, or the numbers in it if it is a list. Returns `value` unchanged.

    Raises:
        UserError: a number is not finite, or the magnitude of an integer is above `most`. The message names `key`.
    """
    for one in value if isinstance(value, list) else [value]:
        limit = most if type(one) is int else _MAX_FLOAT
        if isinstance(one, int | float) and not -limit <= one <= limit:
            raise UserError(f"{key}: {reprlib.repr(one)} is out of range; use a number from -{limit:,} to {limit:,}")
    return value


def integer(config: Mapping[str, Any], key: str, default: int, least: int = 1) -> int:
    """Returns the integer value of a key. Raises UserError if it is no integer, below `least` or too large."""
    value = config.get(key, default)
    if type(value) is not int or value < least:
        raise UserError(f"{key}: must be an integer of at least {least}, not {reprlib.repr(value)}")
    return bounded(value, key)


def number(config: Mapping[str, Any], key: str, default: float) -> float:
    """Returns the positive number at a key. Raises UserError if the value is not a number above 0, or is too large."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UserError(f"{key}: must be a number above 0, not {reprlib.repr(value)}")
    return bounded(value, key)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Returns the boolean value of a key. Raises UserError if the value is neither true nor false."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise UserError(f"{key}: must be true or false, not {reprlib.repr(value)}")
    return value


def mapping(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns the mapping at a key; an empty one if the key is missing or null. Raises UserError for other values."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{key}: must be a mapping, not {reprlib.repr(value)}")
    return value or {}


def layer_types(config: Mapping[str, Any], layers: int) -> list[str] | None:
    """Returns the value of `layer_types`; None if the key is missing or null.

    Raises:
        UserError: the value is not a list with full_attention or sliding_attention for each layer.
    """
    types = config.get("layer_types")
    if types is None:
        return None
    names = types if isinstance(types, list) and all(isinstance(one, str) for one in types) else None
    if names is None or len(names) != layers or set(names) - {"full_attention", "sliding_attention"}:
        found = ", ".join(sorted(set(names))[:5]) if names else ""
        given = reprlib.repr(types) if names is None else f"{len(names)} layers of {found or 'no type'}"
        raise UserError(
            f"layer_types: {given}; give full_attention or sliding_attention for each of the {layers} layers"
        )
    return names

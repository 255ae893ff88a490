"""Reads and checks single values of a config.json. Torch-free."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from weft.errors import UserError

# Far above any model; larger values would overflow PyTorch's sizes, and lists with an entry per layer.
MAX_INTEGER, _MAX_FLOAT = 2**31 - 1, 1e38


def bounded(value: Any, key: str, most: int = MAX_INTEGER) -> Any:
    """Returns the value if its numbers are finite and not too large. Raises UserError."""
    for one in value if isinstance(value, list) else [value]:
        limit = most if type(one) is int else _MAX_FLOAT
        if isinstance(one, int | float) and not -limit <= one <= limit:
            raise UserError(f"{key}: {reprlib.repr(one)} is too large for a model; at most {limit:,}")
    return value


def integer(config: Mapping[str, Any], key: str, default: int, least: int = 1) -> int:
    """A key's integer. Raises UserError."""
    value = config.get(key, default)
    if type(value) is not int or value < least:
        raise UserError(f"{key}: {reprlib.repr(value)} is not an integer of at least {least}")
    return bounded(value, key)


def number(config: Mapping[str, Any], key: str, default: float) -> float:
    """A key's positive number. Raises UserError."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UserError(f"{key}: {reprlib.repr(value)} is not a number above 0")
    return bounded(value, key)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """A key's boolean. Raises UserError."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise UserError(f"{key}: {reprlib.repr(value)} is neither true nor false")
    return value


def mapping(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A key's mapping; empty if missing or null. Raises UserError."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{key}: must be a mapping, not {reprlib.repr(value)}")
    return value or {}


def layer_types(config: Mapping[str, Any], layers: int) -> list[str] | None:
    """`layer_types`, or None if missing. Raises UserError unless each layer has one of the two types."""
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

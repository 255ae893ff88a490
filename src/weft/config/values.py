"""Checks values against types, with messages for people. The types are those of the sections and of signatures."""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types

from weft.config.errors import Problem
from weft.config.section import OwnClass, Spelled
from weft.config.suggest import did_you_mean
from weft.config.tree import COMMAND_LINE, Node

INVALID: Any = object()  # what a value that has been complained of becomes


def check_value(
    node: Node, kind: Any, key: str, problems: list[Problem], *, constraints: Iterable[Any] = (), default: Any = INVALID
) -> Any:
    """A node's value as `kind`, or INVALID and a problem.

    Whole numbers are taken for numbers; `1e9` is taken for a whole number; on the command line a number is taken for
    text where text is asked for. Nothing else is converted.

    Args:
        kind: a type, a union, a Literal, Annotated with `annotated_types`, list[...], tuple[...], dict or Any.
        constraints: more `annotated_types` bounds.
        default: what the key has if it is removed, for the message about a null.
    """
    kind, inner = _unwrap(kind)
    bounds = [*inner, *constraints]
    branches = list(get_args(kind)) if get_origin(kind) in (Union, types.UnionType) else [kind]
    if node.value is None:
        if type(None) in branches or kind is Any:
            return None
        what = "null has no meaning here; remove the key"
        if default is not INVALID:
            what += f" to get the default ({spell(default)})"
        elif default is INVALID:
            what += ", or give it a value"
        problems.append(node.problem(key, what))
        return INVALID
    branches = [branch for branch in branches if branch is not type(None)]
    if OwnClass in branches and isinstance(node.value, str):
        if ":" in node.value:
            return node.value  # whose class is looked for in `config/own.py`
        names = [name for branch in branches if get_origin(branch) is Literal for name in get_args(branch)]
        return _literal(node, tuple(names), key, problems, "; or give module:Class of your own")
    if len(branches) == 1:
        return _check_one(node, branches[0], key, problems, bounds)
    tried: list[list[Problem]] = []
    for branch in branches:
        found: list[Problem] = []
        value = _check_one(node, branch, key, found, bounds)
        if not found:
            return value
        tried.append(found)
    fitting = [found for branch, found in zip(branches, tried, strict=True) if _same_shape(node, branch)]
    if len(fitting) == 1:
        problems += fitting[0]
    else:
        problems.append(node.problem(key, f"must be {' or '.join(map(describe, branches))}, not {show(node)}"))
    return INVALID


def _unwrap(kind: Any) -> tuple[Any, list[Any]]:
    if get_origin(kind) is Annotated:
        inner, *bounds = get_args(kind)
        return inner, bounds
    return kind, []


def _same_shape(node: Node, kind: Any) -> bool:
    origin = get_origin(_unwrap(kind)[0]) or _unwrap(kind)[0]
    if isinstance(node.value, dict):
        return origin is dict
    if isinstance(node.value, list):
        return origin in (list, tuple)
    if isinstance(node.value, str):
        return origin in (str, Literal)
    return origin in (int, float) and not isinstance(node.value, bool)


def _check_one(node: Node, kind: Any, key: str, problems: list[Problem], bounds: list[Any]) -> Any:
    kind, inner = _unwrap(kind)
    bounds = [*inner, *bounds]
    origin = get_origin(kind)
    if kind is Any:
        return node.plain()
    if origin in (Union, types.UnionType):
        return check_value(node, kind, key, problems, constraints=bounds)
    if origin is Literal:
        value = _literal(node, get_args(kind), key, problems)
    elif (origin or kind) in (list, tuple):
        value = _sequence(node, origin or kind, get_args(kind), key, problems)
    elif (origin or kind) is dict:
        value = _mapping(node, get_args(kind), key, problems)
    else:
        value = _scalar(node, kind, key, problems)
    if value is INVALID:
        return INVALID
    for bound in bounds:
        what = _broken(value, bound)
        if what is not None:
            problems.append(node.problem(key, f"must {what}, not {show(node)}"))
            return INVALID
    return value


def _scalar(node: Node, kind: Any, key: str, problems: list[Problem]) -> Any:
    value = node.value
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is int and isinstance(value, float) and value.is_integer() and "e" in (node.text or "").lower():
        return int(value)  # 1e9 tokens
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            problems.append(node.problem(key, f"must be a finite number, not {show(node)}"))
            return INVALID
        return number
    if kind is str and isinstance(value, str):
        return value
    if kind is str and node.file == COMMAND_LINE and node.text is not None:
        return node.text
    problems.append(node.problem(key, f"must be {describe(kind)}, not {show(node)}{_remedy(node, kind)}"))
    return INVALID


def _remedy(node: Node, kind: Any) -> str:
    value = node.value
    if kind is str and not isinstance(value, (dict, list)):
        return f'; quote it: "{node.text if node.text is not None else value}"'
    if kind is bool and isinstance(value, str) and value.lower() in ("yes", "on", "y", "no", "off", "n"):
        return f"; write {'true' if value.lower() in ('yes', 'on', 'y') else 'false'}"
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return ""
        if kind is float or (kind is int and number.is_integer()):
            return "; remove the quotes" if node.text == value and node.file != COMMAND_LINE else ""
    if isinstance(value, list) and len(value) == 1:
        return "; remove the brackets"
    return ""


def _literal(node: Node, choices: tuple[Any, ...], key: str, problems: list[Problem], otherwise: str = "") -> Any:
    for choice in choices:
        if node.value == choice and type(node.value) is type(choice):
            return choice
    words = [str(choice) for choice in choices]
    hint = did_you_mean(node.value, words, cutoff=0.45) if isinstance(node.value, str) else ""
    one_of = f"one of {', '.join(words)}" if len(words) > 1 else words[0]
    problems.append(node.problem(key, f"must be {one_of}, not {show(node)}{hint or otherwise}"))
    return INVALID


def _sequence(node: Node, kind: type, items: tuple[Any, ...], key: str, problems: list[Problem]) -> Any:
    if not isinstance(node.value, list):
        remedy = f"; write [{node.text}]" if node.text is not None else ""
        problems.append(node.problem(key, f"must be a list, not {show(node)}{remedy}"))
        return INVALID
    fixed = kind is tuple and items and items[-1] is not ...
    if fixed and len(node.value) != len(items):
        problems.append(node.problem(key, f"must be a list of {len(items)}, not of {len(node.value)}"))
        return INVALID
    kinds = list(items) if fixed else [items[0] if items else Any] * len(node.value)
    pairs = enumerate(zip(node.value, kinds, strict=True))
    values = [check_value(item, item_kind, f"{key}[{i}]", problems) for i, (item, item_kind) in pairs]
    return INVALID if any(value is INVALID for value in values) else kind(values)


def _mapping(node: Node, items: tuple[Any, ...], key: str, problems: list[Problem]) -> Any:
    if not node.is_mapping:
        problems.append(node.problem(key, f"must be a mapping, not {show(node)}"))
        return INVALID
    kind = items[1] if len(items) == 2 else Any
    values = {name: check_value(item, kind, f"{key}.{name}", problems) for name, item in node.value.items()}
    return INVALID if any(value is INVALID for value in values.values()) else values


def _broken(value: Any, bound: Any) -> str | None:
    """What a value must be by a bound that it breaks."""
    at = annotated_types
    for name, kind, holds, words in (
        ("ge", at.Ge, lambda v, b: v >= b, "be at least"),
        ("gt", at.Gt, lambda v, b: v > b, "be more than"),
        ("le", at.Le, lambda v, b: v <= b, "be at most"),
        ("lt", at.Lt, lambda v, b: v < b, "be less than"),
        ("multiple_of", at.MultipleOf, lambda v, b: v % b == 0, "be a multiple of"),
    ):
        if isinstance(bound, kind) and not holds(value, getattr(bound, name)):
            return f"{words} {getattr(bound, name)}"
    if isinstance(bound, Spelled) and re.fullmatch(str(bound.pattern), value) is None:
        return f"be {bound.words}"
    if isinstance(bound, at.MinLen) and len(value) < bound.min_length:
        return f"have at least {bound.min_length} items"
    if isinstance(bound, at.MaxLen) and len(value) > bound.max_length:
        return f"have at most {bound.max_length} items"
    return None


def describe(kind: Any) -> str:
    """A type in words."""
    if kind == OwnClass:
        return "module:Class"
    kind, bounds = _unwrap(kind)
    spelled = next((bound for bound in bounds if isinstance(bound, Spelled)), None)
    if spelled is not None:
        return spelled.words
    origin = get_origin(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(branch) for branch in get_args(kind))
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    words |= {list: "a list", tuple: "a list", dict: "a mapping"}
    return words.get(origin or kind, "a value" if kind is Any else "a mapping")


def show(node: Node) -> str:
    """A value as it was given, shortened."""
    if isinstance(node.value, dict):
        return "a mapping"
    if isinstance(node.value, list):
        return "a list"
    text = f"'{node.value}'" if isinstance(node.value, str) else node.text or spell(node.value)
    return text if len(text) <= 60 else text[:57] + "...'"


def spell(value: Any) -> str:
    """A value as YAML would have it."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(spell, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {spell(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return value
    return repr(value) if isinstance(value, float) else json.dumps(value, default=str)

"""What pydantic found wrong, in words: one table from its error types, and remedies by what was written.

A union's branches are tried each by itself, and each has its errors. Where the value has the shape of one branch alone,
that branch's errors are told, else what the branches want.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from weft.config.fields import section_class
from weft.config.section import Component, Own, Spelled
from weft.config.suggest import did_you_mean
from weft.config.tree import COMMAND_LINE, Node

# What is to be in a place, by the type of pydantic's error.
_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
}


@dataclass(frozen=True)
class Mistake:
    """One of pydantic's errors, and its place in the file.

    Attributes:
        key: dotted.
        node: what is written there; of a missing key, the section that lacks it.
        type, context: pydantic's.
        value: what was validated: what is written, or what it was converted to.
        path: keys and indices.
        branches: of unions on the way there: where each stands, and which branch was tried.
        field: the declaration of the key, if it is a section's or a component's.
    """

    key: str
    node: Node
    type: str
    context: dict[str, Any]
    value: Any
    path: tuple[int | str, ...]
    branches: tuple[tuple[str, str], ...] = ()
    field: FieldInfo | None = None


def converted(mistake: Mistake) -> Any:
    """What is right in other words; None if nothing is.

    1e9 is a whole number; on the command line, a number is text where text is asked for; a list is a tuple.
    """
    node, value = mistake.node, mistake.value
    if mistake.type == "int_type" and isinstance(value, float):
        return int(value) if value.is_integer() and "e" in (node.text or "").lower() else None
    if mistake.type == "string_type" and node.file == COMMAND_LINE:
        return None if value is None else node.text
    return tuple(value) if mistake.type == "tuple_type" and isinstance(value, list) else None


def settle(mistakes: Iterable[Mistake], depth: int = 0) -> Iterator[tuple[Mistake, ...]]:
    """One mistake for each thing to tell, or several: what the branches of a union want in the same place."""
    unions: dict[str, dict[str, list[Mistake]]] = {}
    for mistake in mistakes:
        if len(mistake.branches) <= depth:
            yield (mistake,)
        else:
            key, branch = mistake.branches[depth]
            unions.setdefault(key, {}).setdefault(branch, []).append(mistake)
    for key, branches in unions.items():
        fitting = [found for found in branches.values() if len(branches) == 1 or any(_fits(key, m) for m in found)]
        if len(fitting) == 1:
            yield from settle(fitting[0], depth + 1)
        else:
            yield tuple(found[0] for found in branches.values())


def _fits(key: str, mistake: Mistake) -> bool:
    """Whether a branch takes values of this shape, so that its errors are worth telling."""
    value = mistake.value
    if mistake.key != key or mistake.type not in (*_WANTED, "literal_error") or "{" in _WANTED.get(mistake.type, ""):
        return True
    if mistake.type == "literal_error":
        return isinstance(value, str)
    return mistake.type == "int_type" and isinstance(value, float)


def message(mistakes: tuple[Mistake, ...]) -> str:
    """What to say, given what `settle` yields."""
    first = mistakes[0]
    if first.type == "told":
        return first.context["what"]
    if first.value is None and first.key != "model":
        return _null(first)
    if len(mistakes) == 2 and {m.type for m in mistakes} == {"literal_error", "string_pattern_mismatch"}:
        literal, pattern = sorted(mistakes, key=lambda m: m.type)
        if pattern.context["pattern"] == Own.pattern:
            if ":" in str(first.value):
                remedy = "write the module as Python imports it, as my_package.module:MyClass"
                return f"{first.value!r} is no module:Class; {remedy}"
            return f"{_must_be(literal)}{_remedy(literal) or '; or give module:Class of your own'}"
    if first.field is None and [m.type for m in mistakes] == ["string_type", "model_type"]:
        name = "a name" if first.key.endswith("]") else "a folder"
        return f"must be {name} or {{type: ...}}, not {show(first.node)}"
    if len(mistakes) > 1:
        kinds = [] if first.field is None else [k for k in get_args(first.field.annotation) if k is not NoneType]
        wanted = " or ".join(map(describe, kinds) if kinds else dict.fromkeys(map(_words, mistakes)))
        return f"must be {wanted}, not {show(first.node)}"
    if first.type == "model_type" and first.field is not None and first.key != "model":
        below = section_class(first.field.annotation)
        named = first.value if isinstance(first.value, str) else "..."
        example = f"{{type: {named}}}" if below and issubclass(below, Component) else "{key: value, ...}"
        return f"must be a mapping, as {first.key}: {example}, not {show(first.node)}"
    if first.type in ("too_few", "too_long") and first.context.get("field_type") != "List":
        items = _items(first.field)
        return f"must be a list of {len(items) or 'another length'}, not of {len(first.node.value)}"
    if first.type == "too_short":
        if not first.value:
            kind, what = ("list", "add an item") if first.value == [] else ("mapping", "name something in it")
            return f"the {kind} is empty; {what}, or remove the key"
        return f"must have at least {first.context['min_length']} items, not {first.context['actual_length']}"
    if first.type == "too_long":
        return f"must have at most {first.context['max_length']} items, not {first.context['actual_length']}"
    if first.type == "string_pattern_mismatch" and not str(first.value).strip():
        return "empty; name a folder" if _words(first) == "a folder" else f"must be {_words(first)}, not empty"
    return _must_be(first) + _remedy(first)


def _must_be(mistake: Mistake) -> str:
    return f"must be {_words(mistake)}, not {show(mistake.node)}"


def _words(mistake: Mistake) -> str:
    """What is wanted."""
    context = mistake.context
    if mistake.type == "literal_error":
        choices = _choices(mistake)
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if mistake.type == "string_pattern_mismatch":
        return Spelled.WORDS.get(context["pattern"], f"text of the form {context['pattern']}")
    if mistake.type == "float_type" and isinstance(mistake.value, int) and not isinstance(mistake.value, bool):
        return "a finite number"
    if mistake.key == "model" and mistake.type == "model_type":
        return "a preset's name or a mapping"
    if mistake.type not in _WANTED:
        return mistake.type.replace("_", " ")
    numbers = {name: int(v) if isinstance(v, float) and v.is_integer() else v for name, v in context.items()}
    return _WANTED[mistake.type].format(**numbers)


def _choices(mistake: Mistake) -> list[str]:
    """The choices of a Literal."""
    words = re.findall(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\s,]+", mistake.context["expected"])
    return [word.strip("'\"") for word in words if word != "or"]


def _items(field: FieldInfo | None) -> tuple[Any, ...]:
    """The types of a tuple's items, if it has a fixed number of them."""
    found = () if field is None or get_origin(field.annotation) is not tuple else get_args(field.annotation)
    return () if ... in found else found


def _null(mistake: Mistake) -> str:
    what, field = "null has no meaning here; remove the key", mistake.field
    if field is None or field.is_required() or field.default is None:
        return f"{what}, or give it a value"
    if section_class(field.annotation) is not None:
        return f"{what} to get the defaults"
    return f"{what} to get the default ({spell(field.get_default(call_default_factory=True))})"


def _remedy(mistake: Mistake) -> str:
    """What to write instead."""
    node, value, wanted = mistake.node, mistake.value, mistake.type
    if wanted == "literal_error":
        return did_you_mean(value, _choices(mistake), cutoff=0.45) if isinstance(value, str) else ""
    if wanted == "string_type" and not isinstance(value, (dict, list)):
        return f'; quote it: "{node.text if node.text is not None else value}"'
    if wanted == "bool_type" and isinstance(value, str) and value.lower() in ("yes", "on", "y", "no", "off", "n"):
        return f"; write {'true' if value.lower() in ('yes', 'on', 'y') else 'false'}"
    if wanted in ("int_type", "float_type") and isinstance(value, str) and node.file != COMMAND_LINE:
        if value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
            return "; give a finite one"
        return "; remove the quotes" if _is_number(value, whole=wanted == "int_type") else ""
    if wanted in ("int_type", "float_type", "bool_type", "string_type") and isinstance(value, list) and len(value) == 1:
        return "; remove the brackets"
    if wanted == "tuple_type" and (items := _items(mistake.field)):
        default = mistake.field.default if mistake.field is not None else None
        return f"; write all {len(items)}, as {spell(default)}" if isinstance(default, tuple) else ""
    if wanted in ("list_type", "tuple_type") and node.text is not None:
        return f"; write [{node.text}]"
    return ""


def _is_number(text: str, *, whole: bool) -> bool:
    try:
        number = float(text)
    except ValueError:
        return False
    return number.is_integer() or not whole


# ---- types and values in words


def describe(kind: Any) -> str:
    """A type in words."""
    if get_origin(kind) is Annotated:
        kind, *bounds = get_args(kind)
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
    return text if len(text) <= 60 else text[:57] + "..."


def spell(value: Any) -> str:
    """A value as YAML would have it."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(spell, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {spell(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return value
    return repr(value) if isinstance(value, float) else json.dumps(value, default=str)

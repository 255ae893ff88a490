"""Converts pydantic's errors to messages, with remedies that depend on the value in the file.

If a value fits no branch of a union, pydantic reports errors for every branch. If only one branch expects a value of
this form (a mapping, for example), Weft reports the errors of that branch. Otherwise one message lists what the
branches expect.
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
from weft.config.section import Component, CustomClass, TextPattern
from weft.config.suggest import did_you_mean
from weft.config.tree import COMMAND_LINE, Node
from weft.formatting import counted

# Type of pydantic's error -> description of the expected value.
_EXPECTED = {
    "int_type": "an integer",
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
class FieldError:
    """An error of pydantic, and its place in the file.

    Attributes:
        key: dotted key.
        node: node of the value; for a missing key, node of its section.
        type, context: pydantic's error type and context.
        value: the value that was validated; it can differ from the file if `convert` changed it.
        path: keys and indices from the root of the file to the value.
        branches: for each union on the path, the dotted key of the union and the name of the branch.
        field: pydantic's definition of the key; None if no section or component defines the key.
    """

    key: str
    node: Node
    type: str
    context: dict[str, Any]
    value: Any
    path: tuple[int | str, ...]
    branches: tuple[tuple[str, str], ...] = ()
    field: FieldInfo | None = None


def convert(error: FieldError) -> Any:
    """Converts the value of an error to the expected type: 1e9 to an integer, a list to a tuple, or a number on the
    command line to a string.

    Returns None if none of these conversions applies.
    """
    node, value = error.node, error.value
    if error.type == "int_type" and isinstance(value, float):
        return int(value) if value.is_integer() and "e" in (node.text or "").lower() else None
    if error.type == "string_type" and node.file == COMMAND_LINE:
        return None if value is None else node.text
    return tuple(value) if error.type == "tuple_type" and isinstance(value, list) else None


def resolve_unions(errors: Iterable[FieldError], depth: int = 0) -> Iterator[tuple[FieldError, ...]]:
    """Yields a tuple of errors for each message to report.

    A tuple is a single error. If a value fits no branch of a union, and the intended branch is not clear, the tuple has
    one error of each branch.

    Args:
        depth: number of enclosing unions whose branch is already chosen. The errors have the same first `depth` items
            in `branches`.
    """
    unions: dict[str, dict[str, list[FieldError]]] = {}
    for error in errors:
        if len(error.branches) <= depth:
            yield (error,)
        else:
            key, branch = error.branches[depth]
            unions.setdefault(key, {}).setdefault(branch, []).append(error)
    for key, branches in unions.items():
        fitting = [found for found in branches.values() if len(branches) == 1 or any(_fits(key, m) for m in found)]
        if len(fitting) == 1:
            yield from resolve_unions(fitting[0], depth + 1)
        else:
            yield tuple(found[0] for found in branches.values())


def _fits(key: str, error: FieldError) -> bool:
    """Whether a value has the form that a union branch expects, such as a mapping, although the branch rejects it.

    Args:
        key: dotted key of the union.
        error: an error that pydantic reports for the branch.
    """
    value = error.value
    if error.key != key or error.type not in (*_EXPECTED, "literal_error") or "{" in _EXPECTED.get(error.type, ""):
        return True
    if error.type == "literal_error":
        return isinstance(value, str)
    return error.type == "int_type" and isinstance(value, float)


def error_message(errors: tuple[FieldError, ...]) -> str:
    """Returns the message for a tuple of errors that `resolve_unions` yields."""
    first = errors[0]
    if first.type == "custom":
        return first.context["what"]
    if first.value is None and first.key != "model":
        return _null(first)
    if len(errors) == 2 and {m.type for m in errors} == {"literal_error", "string_pattern_mismatch"}:
        literal, pattern = sorted(errors, key=lambda m: m.type)
        if pattern.context["pattern"] == CustomClass.pattern:
            if ":" in str(first.value):
                remedy = "write the module as in an import statement, such as my_package.module:MyClass"
                return f"{first.value!r} is not a module:Class; {remedy}"
            return f"{_must_be(literal)}{_remedy(literal) or '; or use module:Class'}"
    if first.field is None and [m.type for m in errors] == ["string_type", "model_type"]:
        name = "a name" if first.key.endswith("]") else "a folder"
        return f"must be {name} or {{type: ...}}, not {written_value(first.node)}"
    if len(errors) > 1:
        kinds = [] if first.field is None else [k for k in get_args(first.field.annotation) if k is not NoneType]
        expected = " or ".join(map(describe, kinds) if kinds else dict.fromkeys(map(_words, errors)))
        return f"must be {expected}, not {written_value(first.node)}"
    if first.type == "model_type" and first.field is not None and first.key != "model":
        below = section_class(first.field.annotation)
        named = first.value if isinstance(first.value, str) else "..."
        example = f"{{type: {named}}}" if below and issubclass(below, Component) else "{key: value, ...}"
        return f"must be a mapping, such as {first.key}: {example}, not {written_value(first.node)}"
    if first.type in ("too_few", "too_long") and first.context.get("field_type") != "List":
        items = _items(first.field)
        expected = counted(len(items), "item") if items else "another length"
        return f"must be a list of {expected}, not of {len(first.node.value)}"
    if first.type == "too_short":
        if not first.value:
            kind, what = ("list", "add an item") if first.value == [] else ("mapping", "add an entry")
            return f"the {kind} is empty; {what}, or remove the key"
        return f"must have at least {first.context['min_length']} items, not {first.context['actual_length']}"
    if first.type == "too_long":
        return f"must have at most {first.context['max_length']} items, not {first.context['actual_length']}"
    if first.type == "string_pattern_mismatch" and not str(first.value).strip():
        return (
            "empty; set the path of a folder" if _words(first) == "a folder" else f"must be {_words(first)}, not empty"
        )
    if first.type == "literal_error" and (others := _kinds_beside_a_literal(first.field)):
        return f"must be {' or '.join(map(describe, others))}, not {written_value(first.node)}{_remedy(first)}"
    return _must_be(first) + _remedy(first)


def _kinds_beside_a_literal(field: FieldInfo | None) -> list[Any]:
    """Returns the types of a field that takes certain words or a number, truth value or list; [] for other fields."""
    kinds = [] if field is None else [kind for kind in get_args(field.annotation) if kind is not NoneType]
    plain = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds]
    literal = any(get_origin(kind) is Literal for kind in kinds)
    return kinds if literal and any(kind in (bool, int, float) or get_origin(kind) is list for kind in plain) else []


def _must_be(error: FieldError) -> str:
    return f"must be {_words(error)}, not {written_value(error.node)}"


def _words(error: FieldError) -> str:
    """Returns a description of the expected value, such as `an integer`."""
    context = error.context
    if error.type == "literal_error":
        choices = _choices(error)
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if error.type == "string_pattern_mismatch":
        return TextPattern.WORDS.get(context["pattern"], f"text of the form {context['pattern']}")
    if error.type == "float_type" and isinstance(error.value, int) and not isinstance(error.value, bool):
        return "a finite number"
    if error.key == "model" and error.type == "model_type":
        return "a preset's name or a mapping"
    if error.type not in _EXPECTED:
        return error.type.replace("_", " ")
    numbers = {name: int(v) if isinstance(v, float) and v.is_integer() else v for name, v in context.items()}
    return _EXPECTED[error.type].format(**numbers)


def _choices(error: FieldError) -> list[str]:
    """Returns the allowed values of a Literal, which pydantic's error lists."""
    words = re.findall(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\s,]+", error.context["expected"])
    return [word.strip("'\"") for word in words if word != "or"]


def _items(field: FieldInfo | None) -> tuple[Any, ...]:
    """Returns the item types of a field whose type is a tuple of fixed length; an empty tuple for any other field."""
    found = () if field is None or get_origin(field.annotation) is not tuple else get_args(field.annotation)
    return () if ... in found else found


def _null(error: FieldError) -> str:
    what, field = "must not be null; remove the key", error.field
    if field is None or field.is_required() or field.default is None:
        return f"{what}, or set a value"
    if section_class(field.annotation) is not None:
        return f"{what} to use the defaults"
    return f"{what} to use the default ({spell(field.get_default(call_default_factory=True))})"


def _remedy(error: FieldError) -> str:
    """Returns how to correct an error, as the end of a message such as `; remove the quotes`; "" if not known."""
    node, value, expected = error.node, error.value, error.type
    if expected == "literal_error":
        return did_you_mean(value, _choices(error), cutoff=0.45) if isinstance(value, str) else ""
    if expected == "string_type" and not isinstance(value, (dict, list)):
        return f'; quote it: "{node.text if node.text is not None else value}"'
    if expected == "bool_type" and isinstance(value, str) and value.lower() in ("yes", "on", "y", "no", "off", "n"):
        return f"; write {'true' if value.lower() in ('yes', 'on', 'y') else 'false'}"
    if expected in ("int_type", "float_type") and isinstance(value, str) and node.file != COMMAND_LINE:
        if value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
            return "; set a finite number"
        return "; remove the quotes" if _is_number(value, integer=expected == "int_type") else ""
    if (
        expected in ("int_type", "float_type", "bool_type", "string_type")
        and isinstance(value, list)
        and len(value) == 1
    ):
        return "; remove the brackets"
    if expected == "tuple_type" and (items := _items(error.field)):
        default = error.field.default if error.field is not None else None
        return f"; write all {len(items)}, such as {spell(default)}" if isinstance(default, tuple) else ""
    if expected in ("list_type", "tuple_type") and node.text is not None:
        return f"; write [{node.text}]"
    return ""


def _is_number(text: str, *, integer: bool) -> bool:
    try:
        number = float(text)
    except ValueError:
        return False
    return number.is_integer() or not integer


# ---- types and values


def describe(kind: Any) -> str:
    """Returns a description of a type, such as `an integer or null`."""
    if get_origin(kind) is Annotated:
        kind, *bounds = get_args(kind)
        spelled = next((bound for bound in bounds if isinstance(bound, TextPattern)), None)
        if spelled is not None:
            return spelled.words
    origin = get_origin(kind)
    if origin is Literal:
        choices = ", ".join(map(str, get_args(kind)))
        return f"one of {choices}" if len(get_args(kind)) > 1 else choices
    if origin in (Union, types.UnionType):
        return " or ".join(describe(branch) for branch in get_args(kind))
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    words |= {list: "a list", tuple: "a list", dict: "a mapping"}
    return words.get(origin or kind, "a value" if kind is Any else "a mapping")


def written_value(node: Node) -> str:
    """Returns a value as it is written in the file, shortened to 60 characters."""
    if isinstance(node.value, dict):
        return "a mapping"
    if isinstance(node.value, list):
        return "a list"
    text = f"'{node.value}'" if isinstance(node.value, str) else node.text or spell(node.value)
    return text if len(text) <= 60 else text[:57] + "..."


def spell(value: Any) -> str:
    """Returns a value in YAML syntax."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(spell, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {spell(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return value
    return repr(value) if isinstance(value, float) else json.dumps(value, default=str)

"""Checks that llguidance can enforce a JSON schema (draft 2020-12) exactly, and prepares the schema for llguidance.

llguidance ignores unknown keywords and values of a wrong type. It does not notice repeated keys of an object, rounds
large integers, and accepts some dates, times and host names that do not exist. This module refuses schemas that these
limits affect, or adds stricter patterns to them. It also removes keywords that begin with `x-`, because `x-guidance`
can make llguidance ignore more keywords.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from weft.errors import UserError

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
DRAFTS = ("draft-06/schema", "draft-07/schema", "draft/2019-09/schema", "draft/2020-12/schema")
FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
ANNOTATIONS = frozenset(
    str.split(
        "$comment title description default deprecated examples readOnly writeOnly contentMediaType contentEncoding "
        "contentSchema"
    )
)
NOT_ENFORCED = frozenset(
    str.split(
        "not if then else dependentRequired dependentSchemas dependencies contains minContains maxContains "
        "propertyNames uniqueItems unevaluatedItems unevaluatedProperties additionalItems $dynamicRef $dynamicAnchor "
        "$recursiveRef $recursiveAnchor $vocabulary"
    )
)
SCHEMA_MAPS = ("$defs", "definitions", "properties", "patternProperties")
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMAS = ("items", "additionalProperties")

_EXACT = 2**53  # llguidance computes with float64
_LEAP_YEAR = "[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00"
_DATE = f"(?:[1-9][0-9]{{3}}-(?:02-(?:[01][0-9]|2[0-8])|(?:0[13-9]|1[0-2])-[0-9]{{2}})|(?:{_LEAP_YEAR})-02-29)"
_LABEL = "[A-Za-z0-9](?:-?[A-Za-z0-9]){0,30}"  # without the double hyphens of Punycode
# Patterns that are enforced together with a format: no 29 February in other years, no leap seconds, years from 1000 on.
_STRICTER: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "date-time": {"pattern": f"^{_DATE}[Tt][0-9:]{{6}}[0-5]"},
    "time": {"pattern": "^[0-9:]{6}[0-5]"},
    "hostname": {"pattern": rf"^{_LABEL}(?:\.{_LABEL})*$", "maxLength": 253},
}

Path = tuple[str | int, ...]


def prepare_schema(schema: Any, error_of: Callable[[Any], str | None]) -> Any:
    """Checks a JSON schema, and returns the schema to pass to llguidance.

    Args:
        schema: the schema, as a JSON value.
        error_of: compiles a schema with llguidance; returns the error, or None.

    Raises:
        UserError: a keyword cannot be enforced, is unknown, or has an invalid value; or no text matches the schema. The
            message has a JSON pointer (RFC 6901) to the keyword.
    """
    try:
        prepared = _prepare(schema, ())
        error = error_of(prepared)
        if error is not None:
            raise _refusal(_blame(prepared, error, error_of), f"this cannot be enforced ({error})")
    except RecursionError:
        raise UserError("json_schema: nested too deeply; use fewer levels") from None
    return prepared


def _refusal(path: Path, why: str, remedy: str = "remove or change it") -> UserError:
    pointer = "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)
    return UserError(f"json_schema: {pointer}{': ' * bool(pointer)}{why}; {remedy}")


def _prepare(schema: Any, path: Path) -> Any:
    """Checks a schema and its subschemas. Returns it without annotations; values of `format` become stricter.

    Args:
        path: keys that lead to `schema` in the full schema, for messages.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        shown = json.dumps(schema)
        shown = shown if len(shown) <= 60 else shown[:60] + "..."
        raise _refusal(path, f"{shown} is not a schema", "write an object, true or false")
    prepared: dict[str, Any] = {}
    for key, value in schema.items():
        here = (*path, key)
        if key in ANNOTATIONS or key.startswith("x-") or (key == "uniqueItems" and value is False):
            continue
        if key in NOT_ENFORCED:
            raise _refusal(here, "this keyword cannot be enforced", "remove it, and check the text afterwards")
        if key in SCHEMA_MAPS and isinstance(value, dict):
            if key == "properties":
                _check_writable(list(value), here)
            prepared[key] = {name: _prepare(item, (*here, name)) for name, item in value.items()}
        elif key in SCHEMA_LISTS and isinstance(value, list) and value:
            prepared[key] = [_prepare(item, (*here, i)) for i, item in enumerate(value)]
        elif key in SCHEMAS:
            prepared[key] = _prepare(value, here)
        else:
            _check_value(key, value, here)
            if key != "$schema":
                prepared[key] = value
    # A later equal key replaces an earlier one, so repeated keys count once. Keys of `required` are not repeated.
    if prepared.get("minProperties", 0) > len(set(prepared.get("required", []))) + 1:
        why = "this number of different keys cannot be enforced"
        raise _refusal((*path, "minProperties"), why, "list keys in `required`, or lower the number")
    stricter = _STRICTER.get(prepared.get("format", ""))
    if stricter is not None:
        prepared["allOf"] = [*prepared.get("allOf", []), stricter]
    return prepared


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_exact(value: Any) -> bool:
    return _is_number(value) and not (type(value) is int and abs(value) > _EXACT)


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_type(value: Any) -> bool:
    return value in TYPES if isinstance(value, str) else _is_strings(value) and set(value) <= set(TYPES) and value != []


_COUNT = (lambda value: type(value) is int and value >= 0, "an integer of at least 0")
_NUMBER = (_is_exact, "a finite number, and for integers at most 2**53")
_STRING = (lambda value: isinstance(value, str), "a string")
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    **dict.fromkeys(("pattern", "$ref", "$anchor", "$id"), _STRING),
    **dict.fromkeys(SCHEMA_MAPS, (lambda value: False, "an object of schemas")),
    **dict.fromkeys(SCHEMA_LISTS, (lambda value: False, "a list of schemas")),
    "multipleOf": (lambda value: _is_exact(value) and value > 0, "a positive number"),
    "required": (_is_strings, "a list of strings"),
    "enum": (lambda value: isinstance(value, list) and value != [], "a list of values"),
    "type": (_is_type, f"one of {', '.join(TYPES)}, or a list of these"),
    "format": (FORMATS.__contains__, f"one of {', '.join(FORMATS)}; other formats cannot be enforced"),
    "$schema": (lambda v: isinstance(v, str) and v.rstrip("#").endswith(DRAFTS), "a draft from 6 to 2020-12"),
    "const": (lambda value: True, ""),
}


def _check_value(key: str, value: Any, path: Path) -> None:
    """Raises UserError if a keyword without subschemas is unknown, or `value` is invalid for this keyword."""
    if key not in _VALUES:
        near = difflib.get_close_matches(key, [*_VALUES, *SCHEMAS, *ANNOTATIONS, *NOT_ENFORCED], 1)
        remedy = f"write {near[0]}" if near else "remove it, or begin its name with x-"
        raise _refusal(path, "this is not a keyword of JSON Schema", remedy)
    is_valid, expected = _VALUES[key]
    if not is_valid(value):
        shown = json.dumps(value)
        shown = shown if len(shown) <= 60 else shown[:60] + "..."
        raise _refusal(path, f"the value is {shown}", f"set it to {expected}")
    if key in ("const", "enum", "required"):
        _check_writable(value, path)


def _check_writable(value: Any, path: Path) -> None:
    """Raises UserError if a JSON constant has a control character, or a number that llguidance cannot write exactly."""
    if isinstance(value, str):
        if any((c < " " and c not in "\b\t\n\f\r") or c == "\x7f" or "\ud800" <= c < "\ue000" for c in value):
            raise _refusal(path, f"{json.dumps(value)} has a control character, which cannot be written")
    elif isinstance(value, list | dict):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_writable(item, path)
    elif type(value) in (int, float) and not _is_exact(value):
        raise _refusal(
            path, f"{value} is not a finite number, or is an integer above 2**53, which cannot be written exactly"
        )


def _blame(root: Any, error: str, error_of: Callable[[Any], str | None]) -> Path:
    """Returns the path of the keyword in the schema `root` that causes llguidance's `error`.

    If no single keyword causes the error, returns the path of the smallest subschema that does not compile. `error_of`
    is as in `prepare_schema`.
    """
    unsatisfiable = "Unsatisfiable" in error

    def fails(path: Path, document: Any) -> bool:
        moved: Any = {"$ref": "#/$defs/root" + "".join(f"/{_encoded(part)}" for part in path)}
        found = error_of({**moved, "$defs": {"root": _move_references(document)}})
        return found is not None and ("Unsatisfiable" in found) == unsatisfiable

    path, node, found = (), root, True
    while found:
        found = False
        for place, child in _children(node):
            if isinstance(child, dict) and fails((*path, *place), root):
                path, node, found = (*path, *place), child, True
                break
    for key in node if isinstance(node, dict) else ():
        if not fails(path, _without(root, (*path, key))):
            return (*path, key)
    return path


def _children(schema: Any) -> Iterator[tuple[Path, Any]]:
    """Yields (relative path, subschema) for each direct subschema of a schema; definitions first."""
    for key in (*SCHEMA_MAPS, *SCHEMA_LISTS, *SCHEMAS) if isinstance(schema, dict) else ():
        value = schema.get(key)
        if key in SCHEMAS and value is not None:
            yield (key,), value
        elif value is not None:
            for name, child in value.items() if isinstance(value, dict) else enumerate(value):
                yield (key, name), child


def _without(value: Any, path: Path) -> Any:
    """Returns a copy of a JSON value without the item at `path`."""
    if len(path) == 1:
        return {key: item for key, item in value.items() if key != path[0]}
    copied: Any = list(value) if isinstance(value, list) else dict(value)
    copied[path[0]] = _without(copied[path[0]], path[1:])
    return copied


def _encoded(part: str | int) -> str:
    return str(part).replace("~", "~0").replace("/", "~1").replace("%", "%25")


def _move_references(value: Any) -> Any:
    """Returns a copy of a schema whose `$ref` pointers are changed so that the copy can be placed at `#/$defs/root`."""
    if isinstance(value, list):
        return [_move_references(item) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _move_references(item) for key, item in value.items()}
    pointer = moved.get("$ref")
    if isinstance(pointer, str) and (pointer == "#" or pointer.startswith("#/")):
        moved["$ref"] = "#/$defs/root" + pointer[1:]
    return moved

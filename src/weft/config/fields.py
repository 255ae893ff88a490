"""Finds the keys of a section class, the descriptions of the keys, and the classes of subsections."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from weft.config.python_source import Module
from weft.config.section import Component


def field_names(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the fields of a section: key in a YAML file -> field."""
    return {info.alias or name: info for name, info in section.model_fields.items()}


def values_by_key(section: BaseModel) -> dict[str, Any]:
    """Returns the values of a section: key in a YAML file -> value."""
    return {info.alias or name: getattr(section, name) for name, info in type(section).model_fields.items()}


def replace_at(tree: Any, path: Sequence[int | str], value: Any) -> Any:
    """Returns `tree` with `value` at `path` (keys and indices). Changes dicts and lists in place; copies tuples."""
    if not path:
        return value
    inner = replace_at(tree[path[0]], path[1:], value)
    if isinstance(tree, tuple):
        return tuple(inner if place == path[0] else item for place, item in enumerate(tree))
    tree[path[0]] = inner
    return tree


@cache
def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Returns key -> description. The descriptions are the docstrings below the section's fields, read from source."""
    found: dict[str, str] = {}
    for kind in reversed([kind for kind in section.__mro__ if kind.__module__.startswith("weft.")]):
        module = Module.parse(kind.__module__, Path(str(sys.modules[kind.__module__].__file__)))
        for field, doc in pairwise(getattr(module.names.get(kind.__name__), "body", ())):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                name = getattr(field.target, "id", "")
                alias = section.model_fields[name].alias if name in section.model_fields else None
                found[alias or name] = " ".join(str(doc.value.value).split())
    return found


def section_class(annotation: Any) -> type[BaseModel] | None:
    """Returns the first section class among the alternatives of an annotation; None if none is a section class."""
    return next(iter(_sections(branches(annotation))), None)


def listed_sections(annotation: Any) -> list[type[BaseModel]]:
    """Returns the section classes that are allowed as items of a list field."""
    return _sections(_items(annotation))


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Returns all section classes that occur in an annotation, directly or as the item type of a list."""
    return [*_sections(branches(annotation)), *listed_sections(annotation)]


def keeps_text(annotation: Any) -> bool:
    """Whether an annotation is a list whose items can be strings, which are short names of built-in components."""
    return str in _items(annotation)


def required_key(section: type[BaseModel]) -> str | None:
    """Returns the first required key of a section; None if it has no required key."""
    return next((name for name, info in field_names(section).items() if info.is_required()), None)


def branches(annotation: Any) -> list[Any]:
    """Returns the alternatives of a union, without `Annotated`. Any other annotation is returned as one alternative."""
    if get_origin(annotation) is Annotated:
        return branches(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for branch in get_args(annotation) for inner in branches(branch)]
    return [annotation]


def _items(annotation: Any) -> list[Any]:
    lists = [branch for branch in branches(annotation) if get_origin(branch) is list]
    return [item for branch in lists for item in branches(get_args(branch)[0])]


def _sections(alternatives: list[Any]) -> list[type[BaseModel]]:
    return [kind for kind in alternatives if isinstance(kind, type) and issubclass(kind, BaseModel)]


@cache
def known_keys(section: type[BaseModel]) -> frozenset[str]:
    """Returns the dotted keys of a section and of its subsections, except arguments of components."""
    found = set()
    for name, info in field_names(section).items():
        below = section_class(info.annotation)
        found.add(name)
        if below is not None and not issubclass(below, Component):
            found |= {f"{name}.{inner}" for inner in known_keys(below)}
    return frozenset(found)

"""What a section's annotations say: its keys, the sections below them, the other types they may have."""

from __future__ import annotations

import types
from functools import cache
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from weft.config.section import Component
from weft.config.whole import RunSections


def field_names(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """A section's keys as they stand in a file."""
    return {info.alias or name: info for name, info in section.model_fields.items()}


def section_class(annotation: Any) -> type[BaseModel] | None:
    """The section among an annotation's alternatives, if there is one."""
    for branch in _branches(annotation):
        if isinstance(branch, type) and issubclass(branch, BaseModel):
            return branch
    return None


def listed_sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a list's items may be, if one of an annotation's alternatives is a list of sections."""
    for branch in _branches(annotation):
        if get_origin(branch) is list:
            items = _branches(get_args(branch)[0])
            if all(isinstance(item, type) and issubclass(item, BaseModel) for item in items):
                return items
    return []


def required_key(section: type[BaseModel]) -> str | None:
    """The first key that a section must have."""
    return next((name for name, info in field_names(section).items() if info.is_required()), None)


def plain_types(annotation: Any) -> list[Any]:
    """An annotation's other alternatives."""
    return [b for b in _branches(annotation) if not (isinstance(b, type) and issubclass(b, BaseModel))]


def _branches(annotation: Any) -> list[Any]:
    return list(get_args(annotation)) if get_origin(annotation) in (Union, types.UnionType) else [annotation]


@cache
def known_keys() -> frozenset[str]:
    """All dotted keys of the sections (components' arguments are not among them)."""

    def walk(section: type[BaseModel], key: str) -> set[str]:
        found = set()
        for name, info in field_names(section).items():
            inner = f"{key}.{name}" if key else name
            below = section_class(info.annotation)
            found |= {inner} | (walk(below, inner) if below is not None and not issubclass(below, Component) else set())
        return found

    return frozenset(walk(RunSections, ""))

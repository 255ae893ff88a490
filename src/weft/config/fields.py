"""What a section's annotations say: its keys, and the sections below them."""

from __future__ import annotations

import types
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from weft.config.section import Component


def field_names(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """A section's keys as they stand in a file."""
    return {info.alias or name: info for name, info in section.model_fields.items()}


def section_class(annotation: Any) -> type[BaseModel] | None:
    """The first section among an annotation's alternatives, if there is one."""
    return next(iter(_sections(branches(annotation))), None)


def listed_sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a list's items may be, if one of an annotation's alternatives is a list of sections."""
    return _sections(_items(annotation))


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """All sections that an annotation names, items of lists too."""
    return [*_sections(branches(annotation)), *listed_sections(annotation)]


def keeps_text(annotation: Any) -> bool:
    """Whether a list's items may be texts that stay texts: names of built-ins."""
    return str in _items(annotation)


def required_key(section: type[BaseModel]) -> str | None:
    """The first key that a section must have."""
    return next((name for name, info in field_names(section).items() if info.is_required()), None)


def branches(annotation: Any) -> list[Any]:
    """An annotation's alternatives, without what they are annotated with."""
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
    """All dotted keys of a section and those below it (components' arguments are not among them)."""
    found = set()
    for name, info in field_names(section).items():
        below = section_class(info.annotation)
        found.add(name)
        if below is not None and not issubclass(below, Component):
            found |= {f"{name}.{inner}" for inner in known_keys(below)}
    return frozenset(found)

"""A run's YAML file -> a checked `RunConfig`, or all that is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from weft.config.draft import Draft
from weft.config.dump import dump_yaml, read_saved
from weft.config.errors import ConfigError, Problem
from weft.config.fields import section_class
from weft.config.foreign import ForeignModelSection
from weft.config.inherit import read_tree
from weft.config.model import CustomModelSection, ModelSection
from weft.config.rules import apply_rules
from weft.config.section import Component
from weft.config.shape import resolve_model
from weft.config.whole import RunSections

__all__ = ["dump_yaml", "load_run", "read_saved"]

_Run = TypeVar("_Run", bound=RunSections)


def load_run(kind: type[_Run], path: Path, overrides: Sequence[str] = (), *, check_data: bool = True) -> _Run:
    """What `RunConfig.load` does; `kind` is `RunConfig`.

    Raises:
        ConfigError: with every problem, ordered by file and line.
    """
    problems: list[Problem] = []
    tree, files = read_tree(path, overrides, problems)
    if tree is None:
        raise ConfigError(in_order(problems, files))
    tree, known = resolve_model(tree, problems)
    draft = Draft(tree, problems)
    draft.model_known = known
    draft.check()
    if draft.whole:
        apply_rules(draft, check_data=check_data)
    if problems:
        raise ConfigError(in_order(problems, files))
    try:
        config = build(kind, draft)
    except ValidationError as error:  # the sections' own last word
        for mistake in error.errors():
            key = ".".join(str(part) for part in mistake["loc"] if isinstance(part, str))
            draft.problem(key, mistake["msg"])
        raise ConfigError(in_order(problems, files)) from None
    config._origins.update(draft.origins)
    return config


def in_order(problems: list[Problem], files: list[str]) -> list[Problem]:
    """By file (the main one first) and line; the same thing said twice is said once."""
    place = {file: number for number, file in enumerate(files)}
    unique = list(dict.fromkeys(problems))
    return sorted(unique, key=lambda p: (place.get(p.file or "", len(files)), p.line or 0))


def build(kind: type[_Run], draft: Draft) -> _Run:
    """The sections from a draft without problems."""
    return kind(**{name: _value(draft, name, info.annotation) for name, info in kind.model_fields.items()})


def _value(draft: Draft, key: str, annotation: Any) -> Any:
    section = section_class(annotation)
    if key in draft.values and (draft.values[key] is None or isinstance(draft.values[key], list)):
        return draft.values[key]
    if key == "model":
        section = CustomModelSection if isinstance(draft.get("model"), dict) else ModelSection
        section = ForeignModelSection if draft.get("model.type") == "hf" else section
    if section is None or key == "log.trackers" or (issubclass(section, Component) and not _is_part(draft, key)):
        return draft.values[key]
    if issubclass(section, Component):
        return draft.component(section, key)
    return section(**_contents(draft, key, section))


def _is_part(draft: Draft, key: str) -> bool:
    return isinstance(draft.get(key), dict)


def _contents(draft: Draft, key: str, section: type[BaseModel]) -> dict[str, Any]:
    return {
        info.alias or name: _value(draft, f"{key}.{info.alias or name}", info.annotation)
        for name, info in section.model_fields.items()
    }

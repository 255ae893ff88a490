"""A run's YAML file -> a checked `RunConfig`, or all that is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from weft.config.draft import Draft
from weft.config.dump import dump_yaml, read_saved
from weft.config.inherit import read_tree
from weft.config.mesh import launched_ranks
from weft.config.model_source import resolve_model
from weft.config.rules import apply_rules
from weft.config.sections import RunSections
from weft.errors import ConfigError, Problem

__all__ = ["dump_yaml", "load_run", "read_saved"]

_Run = TypeVar("_Run", bound=RunSections)


def load_run(
    kind: type[_Run], path: Path, overrides: Sequence[str] = (), *, check_data: bool = True, ranks: int | None = None
) -> _Run:
    """What `RunConfig.load` does; `kind` is `RunConfig`.

    Raises:
        ConfigError: with every problem, ordered by file and line.
    """
    problems: list[Problem] = []
    tree, files = read_tree(path, overrides, problems)
    if tree is None:
        raise ConfigError(in_order(problems, files))
    tree, known = resolve_model(tree, problems)
    draft = Draft[_Run](tree, problems, model_known=known, ranks=ranks or launched_ranks())
    draft.check(kind)
    if draft.whole:
        apply_rules(draft, check_data=check_data)
    if draft.problems:
        raise ConfigError(in_order(draft.problems, files))
    return draft.finish()


def in_order(problems: list[Problem], files: list[str]) -> list[Problem]:
    """By file (the main one first) and line; the same thing said twice is said once."""
    place = {file: number for number, file in enumerate(files)}
    unique = list(dict.fromkeys(problems))
    return sorted(unique, key=lambda p: (place.get(p.file or "", len(files)), p.line or 0))

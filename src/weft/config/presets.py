"""Named model shapes: the literal `PRESETS` of the family files in `weft/models/`, read without importing them.

A preset that names one before it in its file as its `preset` says only what is different, as a run file does.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

_FAMILIES = Path(__file__).resolve().parent.parent / "models"


@cache
def presets(folder: Path = _FAMILIES) -> dict[str, dict[str, Any]]:
    """All presets: name -> keys of `ModelSection`.

    Raises:
        ValueError: a PRESETS that is no plain literal, or a preset made from one that does not stand before it.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "PRESETS" not in source:
            continue
        for node in ast.parse(source).body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "PRESETS" for target in targets):
                found |= _whole(ast.literal_eval(node.value), path)
    return found


def _whole(stated: dict[str, dict[str, Any]], path: Path) -> dict[str, dict[str, Any]]:
    """The presets of a file, with the keys of those that they are made from."""
    whole: dict[str, dict[str, Any]] = {}
    for name, keys in stated.items():
        base, own = keys.get("preset"), {key: value for key, value in keys.items() if key != "preset"}
        if base is not None and base not in whole:
            raise ValueError(f"{path}: preset {name!r} is made from {base!r}, which does not stand before it")
        whole[name] = own if base is None else _merged(whole[base], own)
    return whole


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The keys of both; `own` wins, and mappings merge."""
    both = [key for key, value in own.items() if isinstance(value, dict) and isinstance(base.get(key), dict)]
    return base | own | {key: _merged(base[key], own[key]) for key in both}

"""Named model shapes: the literal `PRESETS` of the family files in `weft/models/`, read without importing them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

_FAMILIES = Path(__file__).resolve().parent.parent / "models"


@cache
def presets(folder: Path = _FAMILIES) -> dict[str, dict[str, Any]]:
    """All presets: name -> keys of `ModelSection`. Raises ValueError for a PRESETS that is no plain literal."""
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
                found.update(ast.literal_eval(node.value))
    return found

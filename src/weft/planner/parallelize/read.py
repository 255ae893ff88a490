"""Reads plans that `write_plan` wrote, also after edits by hand."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.planner.parallelize.placements import PLACEMENTS, placement_of
from weft.planner.parallelize.plan import Plan

NAMES = {
    "DP": "dp", "TP": "tp", "TP2": "tp2", "SHARD_PARAMETERS": "shard_parameters",
    "RESHARD_AFTER_FORWARD": "reshard_after_forward", "STRUCTURE": "structure",
    "PARAMETERS": "parameters", "INPUTS": "inputs", "OUTPUTS": "outputs", "ISLANDS": "islands",
    "RECOMPUTE": "recompute", "PP": "pp", "MICRO_BATCHES": "micro_batches", "SCHEDULE": "schedule", "STAGES": "stages",
}  # fmt: skip  # of the tables in plan.py
OF_STAGES = ("PP", "MICRO_BATCHES", "SCHEDULE", "STAGES")  # only plans with stages have these
OPTIONAL = ("RESHARD_AFTER_FORWARD", "TP2")  # files of earlier versions have none


def read_plan(path: str | Path) -> Plan:
    """Reads `plan.py`, also after edits by hand, or `plan.json`. Does not run the file.

    Raises:
        UserError: there is no such file, or a table of it cannot be read (with file and line).
    """
    path = Path(path)
    text = _text(path)
    if path.suffix == ".json":
        return _from_json(path, text)
    tables = _tables(path, text)
    optional = OPTIONAL if "STAGES" in tables else (*OPTIONAL, *OF_STAGES)
    needed = [name for name in NAMES if name not in optional]
    missing = [name for name in needed if name not in tables]
    if missing:
        raise UserError(f"{path}: no {missing[0]}; it is not a plan of `weft parallelize`")
    plan = Plan(**{NAMES[name]: value for name, value in tables.items()})
    twin = path.with_suffix(".json")
    written = _from_json(twin, _text(twin)) if twin.is_file() else plan
    same = all(getattr(plan, name) == getattr(written, name) for name in NAMES.values())
    return written if same else plan


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; write a plan with: weft parallelize my:Net --out {path}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text, so not a plan of `weft parallelize`") from error


def _from_json(path: Path, text: str) -> Plan:
    try:
        values = json.loads(text)
        if not isinstance(values, Mapping):
            raise TypeError("not an object")
        return Plan.from_json(values)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a plan: {error}; write it again with `weft parallelize`") from error


def _tables(path: Path, text: str) -> dict[str, Any]:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno}: {error.msg}") from error
    found: dict[str, Any] = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        names = [
            one.id for one in (target.elts if isinstance(target, ast.Tuple) else [target]) if isinstance(one, ast.Name)
        ]
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for name, value in zip(names, values, strict=False):
            if name in NAMES:
                found[name] = _read_value(path, name, value)
    return found


def _read_value(path: Path, name: str, node: ast.expr) -> Any:
    try:
        if NAMES[name] in PLACEMENTS and isinstance(node, ast.Dict):
            keys = [ast.literal_eval(key) for key in node.keys if key is not None]
            return {key: placement_of(ast.unparse(one)) for key, one in zip(keys, node.values, strict=True)}
        value = ast.literal_eval(node)
        if name == "STAGES":
            return tuple((str(begin), tuple(map(str, names))) for begin, names in value)
    except (ValueError, TypeError, UserError) as error:
        raise UserError(f"{path}:{node.lineno}: {name}: {error}; give plain values and Shard(dim)") from error
    return tuple(value) if name == "RECOMPUTE" else value

"""Merges a file, the files that it extends, and command line overrides into one tree."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from weft.config.tree import COMMAND_LINE, Node, merge, parse, read_file
from weft.errors import Problem

# Section -> its default `type`.
TYPES = {"objective": "pretrain", "optimizer": "adamw", "schedule": "cosine", "model": "decoder"}
_KEY = re.compile(r"[^\s.=]+(\.[^\s.=]+)*")


def read_tree(path: Path, overrides: Sequence[str], problems: list[Problem]) -> tuple[Node | None, list[str]]:
    """Merges a file, the files that it extends, and overrides.

    Args:
        path: the main file.
        overrides: `key.path=value` arguments.
        problems: problems are added to this list.

    Returns:
        The tree, or None if a file could not be read; and the names of the files: the main file, then the files that
        it extends, then "command line".
    """
    files: list[str] = []
    tree = _read(path, str(path), [], files, problems, None)
    over = read_overrides(overrides, tree or Node({}), problems)
    if tree is not None and over.value:
        tree = merge(tree, over, types=TYPES)
    return tree, [*files, COMMAND_LINE]


def _read(
    path: Path, label: str, chain: list[tuple[Path, str]], files: list[str], problems: list[Problem], at: Problem | None
) -> Node | None:
    real = Path(os.path.realpath(path))
    if any(real == above for above, _ in chain):
        names = " -> ".join([*(name for _, name in chain), label])
        where = at or Problem("extends", "", label)
        what = f"files extend each other in a circle: {names}; remove one of the keys extends"
        problems.append(Problem("extends", what, where.file, where.line))
        return None
    if label not in files:
        files.append(label)
    node = read_file(path, label, problems, at)
    if node is None:
        return None
    node = _with_model(node)
    extends = node.get("extends")
    child = Node({key: value for key, value in node.value.items() if key != "extends"}, node.file, node.line)
    if extends is None:
        return child
    bases: list[Node | None] = []
    for base in extends.value if isinstance(extends.value, list) else [extends]:
        if not isinstance(base.value, str) or not base.value.strip() or "\0" in base.value:
            problems.append(
                base.problem("extends", "must be a file name or a list of file names; write extends: base.yaml")
            )
            bases.append(None)
            continue
        name = os.path.normpath(os.path.join(os.path.dirname(label), base.value))
        above = [*chain, (real, label)]
        bases.append(_read(path.parent / base.value, name, above, files, problems, base.problem("extends", "")))
    if None in bases:
        return None
    merged: Node | None = None
    for one in (*bases, child):
        merged = one if merged is None or one is None else merge(merged, one, types=TYPES)
    return merged


def _with_model(node: Node) -> Node:
    """Converts `model: llama-60m` to `model: {preset: llama-60m}`, which replaces an inherited model."""
    model = node.get("model")
    if model is None or not isinstance(model.value, str):
        return node
    chosen = Node({"type" if ":" in model.value else "preset": model}, model.file, model.line, replaces=True)
    return Node({**node.value, "model": chosen}, node.file, node.line)


def read_overrides(overrides: Sequence[str], base: Node, problems: list[Problem]) -> Node:
    """Returns `key.path=value` arguments as one tree; later arguments take precedence.

    Args:
        base: the tree of the files. A key that names an item of a list in this tree is a problem.
        problems: problems are added to this list.
    """
    tree = Node({}, COMMAND_LINE)
    for override in overrides:
        key, equals, text = override.partition("=")
        wrong = None
        if not equals or not _KEY.fullmatch(key):
            key, wrong = "", f"{override!r} is not key=value; write it like optimizer.lr=1e-3"
        elif key.split(".")[0] == "extends":
            wrong = "extends cannot be set on the command line; write extends in the file"
        elif (items := _list_above(base, key.split("."))) is not None:
            wrong = f"items of a list cannot be set one by one; write the full list: {items}='[...]'"
        elif not text.strip():
            wrong = "no value after '='; write null to unset an optional key"
        if wrong is not None:
            problems.append(Problem(key, wrong, COMMAND_LINE))
            continue
        value = parse(text, COMMAND_LINE, found := [], numbered=False)
        problems += [Problem(key, problem.what, COMMAND_LINE) for problem in found]
        if value is not None:
            for part in reversed(key.split(".")):
                value = Node({part: value}, COMMAND_LINE)
            tree = merge(tree, _with_model(value))
    return tree


def _list_above(base: Node, parts: list[str]) -> str | None:
    """Returns the dotted key of the list that contains an item (`data.train` for `data.train.0.weight`).

    Returns None if no list contains it.

    Args:
        base: the tree of the files.
        parts: the parts of the item's dotted key.
    """
    for place, part in enumerate(parts):
        name, bracket, _ = part.partition("[")
        if bracket:
            return ".".join([*parts[:place], name])
        node = base.get(*parts[:place]) if place else None
        if node is not None and (isinstance(node.value, list) or (part.isdecimal() and not node.is_mapping)):
            return ".".join(parts[:place])
    return None

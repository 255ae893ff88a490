"""From a file to one tree: `extends`, then overrides from the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from weft.config.tree import COMMAND_LINE, Node, merge, parse, read_file
from weft.errors import Problem

# A `type` that is not written is this one.
TYPES = {"objective": "pretrain", "optimizer": "adamw", "schedule": "cosine", "model": "decoder"}
_KEY = re.compile(r"[^\s.=]+(\.[^\s.=]+)*")


def read_tree(path: Path, overrides: Sequence[str], problems: list[Problem]) -> tuple[Node | None, list[str]]:
    """A file with all that it extends, and the overrides over it.

    Returns:
        The tree, or None if a file could not be read; and the files' names, the main one first, then "command line".
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
        problems.append(
            Problem("extends", f"files extend each other in a circle: {names}; take one out", where.file, where.line)
        )
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
    bases = extends.value if isinstance(extends.value, list) else [extends]
    merged: Node | None = None
    broken = False
    for base in bases:
        if not isinstance(base.value, str) or not base.value.strip() or "\0" in base.value:
            problems.append(base.problem("extends", "must be a file's name, or a list of them"))
            broken = True
            continue
        wanted = path.parent / base.value
        name = os.path.normpath(os.path.join(os.path.dirname(label), base.value))
        read = _read(wanted, name, [*chain, (real, label)], files, problems, base.problem("extends", ""))
        broken |= read is None
        if read is not None:
            merged = read if merged is None else merge(merged, read, types=TYPES)
    if broken:
        return None
    return child if merged is None else merge(merged, child, types=TYPES)


def _with_model(node: Node) -> Node:
    """`model: llama-60m` is `model: {preset: llama-60m}`; written so, it replaces whatever model a base has."""
    model = node.get("model")
    if model is None or not isinstance(model.value, str):
        return node
    chosen = Node({"type" if ":" in model.value else "preset": model}, model.file, model.line, replaces=True)
    return Node({**node.value, "model": chosen}, node.file, node.line)


def read_overrides(overrides: Sequence[str], base: Node, problems: list[Problem]) -> Node:
    """`key.path=value` arguments over `base` as one tree; a later one wins over an earlier."""
    tree = Node({}, COMMAND_LINE)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not _KEY.fullmatch(key):
            problems.append(Problem("", f"{override!r} is not key=value; write it as optimizer.lr=1e-3", COMMAND_LINE))
            continue
        if key.split(".")[0] == "extends":
            problems.append(Problem(key, "only a file can extend another; write it there", COMMAND_LINE))
            continue
        if (whole := _list_above(base, key.split("."))) is not None:
            what = f"the items of a list are not set one by one; write all of it, as {whole}='[...]'"
            problems.append(Problem(key, what, COMMAND_LINE))
            continue
        if not text.strip():
            problems.append(
                Problem(key, "there is no value after '='; to unset an optional key write null", COMMAND_LINE)
            )
            continue
        value = parse(text, COMMAND_LINE, found := [], numbered=False)
        problems += [Problem(key, problem.what, COMMAND_LINE) for problem in found]
        if value is None:
            continue
        for part in reversed(key.split(".")):
            value = Node({part: value}, COMMAND_LINE)
        tree = merge(tree, _with_model(value))
    return tree


def _list_above(base: Node, parts: list[str]) -> str | None:
    """The list whose item a key means, as `data.train` of `data.train.0.weight` and `data.train[0]`; None if none."""
    for place, part in enumerate(parts):
        name, bracket, _ = part.partition("[")
        if bracket:
            return ".".join([*parts[:place], name])
        node = base.get(*parts[:place]) if place else None
        if node is not None and (isinstance(node.value, list) or (part.isdecimal() and not node.is_mapping)):
            return ".".join(parts[:place])
    return None

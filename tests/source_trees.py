"""The sources of Weft as trees, for tests of what they may contain."""

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import weft

ROOT = Path(weft.__file__).parent


@cache
def sources() -> dict[str, str]:
    """The text of each file, by its path in the package."""
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(ROOT.rglob("*.py"))}


@cache
def trees() -> dict[str, ast.Module]:
    """The tree of each file, by its path in the package."""
    gc.disable()  # none of it is garbage, and looking takes two thirds of the time
    try:
        return {name: ast.parse(text) for name, text in sources().items()}
    finally:
        gc.enable()


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, in another order and without contexts and operators, which are half of all nodes."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for value in node.__dict__.values():
            if value.__class__ is list:
                waiting += [one for one in value if isinstance(one, ast.AST)]
            elif isinstance(value, ast.AST) and value.__dict__:
                waiting.append(value)


def dotted(node: ast.expr) -> str:
    """As `ast.unparse`, which takes a hundred times as long for a dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ast.unparse(node)

"""Finds modules, and classes in them, by their source, without importing anything."""

from __future__ import annotations

import ast
import functools
import sys
from dataclasses import dataclass, field
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from typing import Any

DEPTH = 12  # how many imports, aliases and base classes are followed


class NotFound(Exception):
    """There is no such module, or no such class in it. The text says what is there."""


class NoModule(NotFound):
    """There is no such module."""


@dataclass(frozen=True)
class ClassSource:
    """A class definition and the module it stands in."""

    module: Module
    node: ast.ClassDef

    @property
    def doc(self) -> str:
        """The docstring."""
        return ast.get_docstring(self.node) or ""

    @property
    def place(self) -> str:
        """File and line, as `my_parts.py:12`."""
        return f"{_short(self.module.path)}:{self.node.lineno}"

    @property
    def bases(self) -> list[str]:
        """Names of the base classes, without their modules."""
        return [last_name(base) for base in self.node.bases]


@dataclass(frozen=True)
class Module:
    """A parsed source file. `names` has what its top level defines, also within `if` and `try`."""

    name: str
    path: Path
    package: str
    names: dict[str, ast.AST | tuple[str, str | None]] = field(hash=False, compare=False)
    stars: tuple[str, ...] = field(default=(), hash=False, compare=False)

    @classmethod
    def parse(cls, name: str, path: Path) -> Module:
        """Raises NotFound if it is no Python source."""
        return _parse(name, path, path.stat().st_mtime_ns if path.exists() else 0)

    def look_up(self, name: str, depth: int = DEPTH) -> Found:
        """What a dotted name means here: a class, an assigned expression or a function, a module's name, or None."""
        head, _, rest = name.partition(".")
        found: Found = None
        entry = self.names.get(head)
        if depth <= 0:
            return None
        if isinstance(entry, ast.ClassDef):
            found = ClassSource(self, entry)
        elif isinstance(entry, ast.expr):
            alias = dotted(entry)
            found = self.look_up(alias, depth - 1) if alias and alias != head else None
            found = found or (self, entry)
        elif isinstance(entry, _FUNCTIONS):
            found = (self, entry)
        elif isinstance(entry, tuple):
            module, member = entry
            found = module if member is None else _member(module, member, depth - 1)
        else:
            for module in self.stars:
                if (found := _member(module, head, depth - 1)) is not None:
                    break
        if not rest:
            return found
        if isinstance(found, str):
            return _member(found, rest, depth - 1)
        return None

    def first_public_class(self) -> ClassSource | None:
        """The first class at the top of the file whose name has no leading underscore."""
        for name, entry in self.names.items():
            if isinstance(entry, ast.ClassDef) and not name.startswith("_"):
                return ClassSource(self, entry)
        return None


Found = ClassSource | tuple[Module, ast.AST] | str | None
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Expressions that are certainly no class, in words.
_VALUES: dict[type[ast.AST], str] = {
    **dict.fromkeys((ast.List, ast.ListComp), "a list"),
    **dict.fromkeys((ast.Dict, ast.DictComp), "a dictionary"),
    **dict.fromkeys((ast.Set, ast.SetComp), "a set"),
    **dict.fromkeys((*_FUNCTIONS, ast.Lambda), "a function"),
    ast.Tuple: "a tuple",
    ast.JoinedStr: "text",
    ast.GeneratorExp: "a generator",
    ast.Compare: "true or false",
}


@functools.lru_cache(maxsize=256)
def _parse(name: str, path: Path, _modified: int) -> Module:
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise NotFound(f"{path}{f':{line}' if line else ''} is not Python: {getattr(error, 'msg', error)}") from None
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    names: dict[str, Any] = {}
    stars: list[str] = []
    _collect(tree.body, package, names, stars)
    return Module(name, path, package, names, tuple(stars))


def _collect(body: list[ast.stmt], package: str, names: dict[str, Any], stars: list[str]) -> None:
    for node in body:
        if isinstance(node, (ast.ClassDef, *_FUNCTIONS)):
            names[node.name] = node
        elif isinstance(node, ast.Assign):
            names.update({target.id: node.value for target in node.targets if isinstance(target, ast.Name)})
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            names[node.target.id] = node.value
        elif isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                names[bound] = (alias.name if alias.asname else bound, None)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            for alias in node.names:
                if alias.name == "*":
                    stars.append(module)
                else:
                    names[alias.asname or alias.name] = (module, alias.name)
        else:
            branches = [getattr(node, "body", []), getattr(node, "orelse", []), getattr(node, "finalbody", [])]
            branches += [handler.body for handler in getattr(node, "handlers", [])]
            for number, branch in enumerate(branches if isinstance(node, (ast.If, ast.Try, ast.With)) else ()):
                found: dict[str, Any] = {}
                _collect(branch, package, found, stars)
                for name, entry in found.items():
                    # `except ImportError: X = None` does not hide the X that was to be imported.
                    first = number == 0 and value_in_words(entry) is None
                    if first or name not in names or value_in_words(names[name]) is not None:
                        names[name] = entry


def value_in_words(entry: ast.AST | tuple | None) -> str | None:
    """What an entry of `Module.names` is, if it is certainly no class; None if it is or may be one."""
    if isinstance(entry, ast.UnaryOp):
        entry = entry.operand
    if isinstance(entry, ast.Constant):
        kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", type(None): "None"}
        return kinds.get(type(entry.value), "a value")
    if isinstance(entry, _FUNCTIONS) and entry.decorator_list:
        return None
    return _VALUES.get(type(entry)) if isinstance(entry, ast.AST) else None


def find_module(name: str) -> Path | None:
    """A module's source file, found as an import would find it, but importing no parent package.

    The working directory comes first, then `sys.path`. A package without `__init__.py` is its folder.

    Returns:
        None for a module without Python source (built in, compiled).

    Raises:
        NotFound: there is none.
    """
    search: list[str] | None = ["", *sys.path]
    spec = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        partial = ".".join(parts[:depth])
        spec = PathFinder.find_spec(partial, [str(Path.cwd()) if entry == "" else entry for entry in search or []])
        if spec is None and depth == 1:
            spec = BuiltinImporter.find_spec(partial) or FrozenImporter.find_spec(partial)
            for finder in sys.meta_path:  # such as those of editable installs
                if spec is None and finder not in (PathFinder, BuiltinImporter, FrozenImporter):
                    spec = finder.find_spec(partial, None)
        if spec is None:
            where = (
                f"in the package {'.'.join(parts[: depth - 1])}" if depth > 1 else "here or among the installed ones"
            )
            raise NoModule(f"no module {partial!r} {where}")
        search = list(spec.submodule_search_locations or [])
    assert spec is not None
    if spec.origin and spec.origin.endswith(".py"):
        return Path(spec.origin)
    return Path(search[0]) if search and spec.origin is None else None


def find_class(module: str, name: str) -> ClassSource | None:
    """A class's definition; re-exports (`from x import y as z`) are followed.

    Returns:
        None where there is no Python source to read.

    Raises:
        NotFound: no such module or class.
    """
    path = find_module(module)
    if path is None or path.is_dir():
        if path is not None:
            raise NotFound(f"{module!r} is a folder without __init__.py: name a module in it")
        return None
    parsed = Module.parse(module, path)
    found = parsed.look_up(name)
    if isinstance(found, ClassSource):
        return found
    entry, place = parsed.names.get(name), parsed
    if isinstance(found, tuple):
        place, entry = found
    what = "a module" if isinstance(entry, tuple) and entry[1] is None else value_in_words(entry)
    if what is not None:
        line = f":{entry.lineno}" if isinstance(entry, (ast.expr, ast.stmt)) else ""
        raise NotFound(f"{name!r} is no class but {what} ({_short(place.path)}{line}); name a class")
    if found is None and name not in parsed.names and "__getattr__" not in path.read_text(encoding="utf-8"):
        classes = [n for n, entry in parsed.names.items() if isinstance(entry, ast.ClassDef) and not n.startswith("_")]
        raise NotFound(
            f"no class {name!r} in {_short(path)}" + (f"; it has {', '.join(classes[:8])}" if classes else "")
        )
    return None


def _member(module: str, name: str, depth: int) -> Found:
    if depth <= 0:
        return None
    try:
        path = find_module(module)
        if path is not None and not path.is_dir():
            found = Module.parse(module, path).look_up(name, depth)
            if found is not None:
                return found
        head, _, rest = name.partition(".")
        find_module(f"{module}.{head}")
        return _member(f"{module}.{head}", rest, depth - 1) if rest else f"{module}.{head}"
    except NotFound:
        return None


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` of a chain of names; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else None
    return None


def last_name(node: ast.AST) -> str:
    """`c` of `a.b.c` and of `a.b.c[...]`."""
    if isinstance(node, ast.Subscript):
        node = node.value
    return (dotted(node) or "").rpartition(".")[2]


def any_named(nodes: list[ast.expr], name: str) -> bool:
    """Whether one of the expressions is that name, whatever module stands before it."""
    return any(last_name(node) == name for node in nodes)

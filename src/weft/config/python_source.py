"""Finds and parses the source of modules and classes, without importing them."""

from __future__ import annotations

import ast
import functools
import sys
from dataclasses import dataclass, field
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from typing import Any

DEPTH = 12  # maximum length of a chain of imports, aliases and base classes that is followed


class NotFound(Exception):
    """Raised if a class cannot be found: there is no such module, no such name in it, or the name is not a class."""


class ModuleMissing(NotFound):
    """Raised if a module does not exist."""


@dataclass(frozen=True)
class ClassSource:
    """A class definition and its module."""

    module: Module
    node: ast.ClassDef

    @property
    def doc(self) -> str:
        """The docstring of the class, or an empty string."""
        return ast.get_docstring(self.node) or ""

    @property
    def place(self) -> str:
        """File and line of the class, such as `my_components.py:12`."""
        return f"{_short(self.module.path)}:{self.node.lineno}"

    @property
    def bases(self) -> list[str]:
        """Names of the base classes, without their modules."""
        return [last_name(base) for base in self.node.bases]


@dataclass(frozen=True)
class Module:
    """A parsed source file.

    Attributes:
        name: dotted name of the module.
        path: the source file.
        package: dotted name of the package, for relative imports.
        names: name -> definition, or (module, member) of an import, at the top level and within `if`, `try` and `with`.
        stars: modules of `from module import *`.
    """

    name: str
    path: Path
    package: str
    names: dict[str, ast.AST | tuple[str, str | None]] = field(hash=False, compare=False)
    stars: tuple[str, ...] = field(default=(), hash=False, compare=False)

    @classmethod
    def parse(cls, name: str, path: Path) -> Module:
        """Parses a file.

        Raises:
            NotFound: the file cannot be read, or is not valid Python.
        """
        return _parse(name, path, path.stat().st_mtime_ns if path.exists() else 0)

    def resolve(self, name: str, depth: int = DEPTH) -> Found:
        """Returns what a dotted name in this module refers to.

        The result is a class; a pair of the defining module and an expression or function; or the name of a module. It
        is None if the source does not show what the name refers to.

        Args:
            depth: maximum number of imports and aliases to follow.
        """
        head, _, rest = name.partition(".")
        found: Found = None
        entry = self.names.get(head)
        if depth <= 0:
            return None
        if isinstance(entry, ast.ClassDef):
            found = ClassSource(self, entry)
        elif isinstance(entry, tuple):
            module, member = entry
            found = module if member is None else _member(module, member, depth - 1)
        elif entry is not None:
            alias = dotted_name(entry)
            found = self.resolve(alias, depth - 1) if alias and alias != head else None
            found = found or (self, entry)
        else:
            members = (_member(module, head, depth - 1) for module in self.stars)
            found = next((member for member in members if member is not None), None)
        if not rest:
            return found
        return _member(found, rest, depth - 1) if isinstance(found, str) else None

    def first_public_class(self) -> ClassSource | None:
        """Returns the first class of the file whose name has no leading underscore; None if there is no such class."""
        for name, entry in self.names.items():
            if isinstance(entry, ast.ClassDef) and not name.startswith("_"):
                return ClassSource(self, entry)
        return None


Found = ClassSource | tuple[Module, ast.AST] | str | None
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Definitions that are certainly not classes.
_VALUES = (
    *(ast.Constant, ast.UnaryOp, ast.Compare, ast.JoinedStr, ast.Lambda, *_FUNCTIONS),
    *(ast.List, ast.Dict, ast.Set, ast.Tuple, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp),
)


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
            stars += [module for alias in node.names if alias.name == "*"]
            names.update({a.asname or a.name: (module, a.name) for a in node.names if a.name != "*"})
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            handlers = [handler.body for handler in getattr(node, "handlers", [])]
            for branch in (node.body, getattr(node, "orelse", []), getattr(node, "finalbody", []), *handlers):
                found: dict[str, Any] = {}
                _collect(branch, package, found, stars)
                for name, entry in found.items():
                    # `except ImportError: X = None` does not hide the X that is imported otherwise.
                    first = branch is node.body and not _is_value(entry)
                    if first or name not in names or _is_value(names[name]):
                        names[name] = entry


def _is_value(entry: ast.AST | tuple | None) -> bool:
    """Whether an entry of `Module.names` is certainly not a class."""
    return isinstance(entry, _VALUES) and not getattr(entry, "decorator_list", None)


def find_module(name: str) -> Path | None:
    """Finds the source file of a module, in the way that an import does, but without importing parent packages.

    The working directory is searched first, then `sys.path`.

    Returns:
        The file, or the folder of a package without `__init__.py`; None for a module without Python source (built in or
        compiled).

    Raises:
        ModuleMissing: the module does not exist.
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
            package = f"package {'.'.join(parts[: depth - 1])}"
            where = f"in the {package}" if depth > 1 else "in the working directory or among installed packages"
            raise ModuleMissing(f"no module {partial!r} {where}")
        search = list(spec.submodule_search_locations or [])
    assert spec is not None
    if spec.origin and spec.origin.endswith(".py"):
        return Path(spec.origin)
    return Path(search[0]) if search and spec.origin is None else None


def find_class(module: str, name: str) -> ClassSource | None:
    """Finds the definition of a class; re-exports (`from x import y as z`) are followed.

    Returns:
        The class; None if there is no Python source, or the source does not show what the name is.

    Raises:
        NotFound: the module or the class does not exist, or the name is not a class.
    """
    path = find_module(module)
    if path is None:
        return None
    if path.is_dir():
        raise NotFound(f"{module!r} is a folder without __init__.py; use the name of a module in this folder")
    parsed = Module.parse(module, path)
    found = parsed.resolve(name)
    if isinstance(found, ClassSource):
        return found
    place, entry = found if isinstance(found, tuple) else (parsed, parsed.names.get(name))
    if isinstance(entry, tuple) and entry[1] is None:
        raise NotFound(f"{name!r} is a module ({_short(path)}), not a class; use the name of a class")
    if _is_value(entry):
        line = getattr(entry, "lineno", None)
        raise NotFound(f"{name!r} is not a class ({_short(place.path)}:{line}); use the name of a class")
    if found is None and name not in parsed.names and "__getattr__" not in path.read_text(encoding="utf-8"):
        classes = [n for n, entry in parsed.names.items() if isinstance(entry, ast.ClassDef) and not n.startswith("_")]
        known = f"; use one of {', '.join(classes[:8])}" if classes else ""
        raise NotFound(f"no class {name!r} in {_short(path)}{known}")
    return None


def _member(module: str, name: str, depth: int) -> Found:
    if depth <= 0:
        return None
    try:
        path = find_module(module)
        if path is not None and not path.is_dir():
            found = Module.parse(module, path).resolve(name, depth)
            if found is not None:
                return found
        head, _, rest = name.partition(".")
        find_module(f"{module}.{head}")
        return _member(f"{module}.{head}", rest, depth - 1) if rest else f"{module}.{head}"
    except NotFound:
        return None


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def dotted_name(node: ast.AST) -> str | None:
    """Returns the text of a dotted name, such as `a.b.c`; None for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted_name(node.value)
        return f"{head}.{node.attr}" if head else None
    return None


def last_name(node: ast.AST) -> str:
    """Returns the last part of a dotted name: `c` for `a.b.c` and for `a.b.c[...]`; else an empty string."""
    if isinstance(node, ast.Subscript):
        node = node.value
    return (dotted_name(node) or "").rpartition(".")[2]

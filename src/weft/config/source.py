"""Reads what a class's constructor takes from the class's source, without importing anything."""

from __future__ import annotations

import ast
import functools
import sys
from dataclasses import dataclass, field
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import annotated_types

_DEPTH = 12  # how many imports, aliases and base classes are followed
_PLAIN: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "list": list,
    "tuple": tuple,
    "dict": dict,
}
_GENERIC = {
    **dict.fromkeys(("list", "List", "Sequence", "Iterable", "Collection"), list),
    **dict.fromkeys(("tuple", "Tuple"), tuple),
    **dict.fromkeys(("dict", "Dict", "Mapping", "MutableMapping"), dict),
}
_CONSTRAINTS = ("Ge", "Gt", "Le", "Lt", "MultipleOf", "MinLen", "MaxLen")
_WITHOUT_ARGUMENTS = {"object", "ABC", "Generic", "Protocol", "Module"}


class NotFound(Exception):
    """There is no such module, or no such class in it. The text says what is there."""


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()  # no default, or none that can be read from the source


@dataclass(frozen=True)
class Argument:
    """One argument of a constructor. `type` is a typing object, or Any where the source does not say."""

    name: str
    type: Any
    required: bool
    default: Any = MISSING


@dataclass(frozen=True)
class Signature:
    """What a class takes.

    Attributes:
        positional: names of the arguments that can be given by position, in order.
        arguments: all, by name.
        accepts_any: there is a `**kwargs`, or the constructor is one that cannot be read.
    """

    positional: tuple[str, ...] = ()
    arguments: dict[str, Argument] = field(default_factory=dict)
    accepts_any: bool = False


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
    def bases(self) -> list[str]:
        """Names of the base classes, without their modules."""
        return [_last_name(base) for base in self.node.bases]


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

    def look_up(self, name: str, depth: int = _DEPTH) -> ClassSource | tuple[Module, ast.expr] | str | None:
        """What a dotted name means here: a class, an assigned expression, a module's name, or None."""
        head, _, rest = name.partition(".")
        found: ClassSource | tuple[Module, ast.expr] | str | None = None
        entry = self.names.get(head)
        if depth <= 0:
            return None
        if isinstance(entry, ast.ClassDef):
            found = ClassSource(self, entry)
        elif isinstance(entry, ast.expr):
            alias = _dotted(entry)
            found = self.look_up(alias, depth - 1) if alias and alias != head else None
            found = found or (self, entry)
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
        if isinstance(node, ast.ClassDef):
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
            for inner in ("body", "orelse", "finalbody"):
                if isinstance(node, (ast.If, ast.Try, ast.With)):
                    _collect(getattr(node, inner, []), package, names, stars)
            for handler in getattr(node, "handlers", []):
                _collect(handler.body, package, names, stars)


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
            raise NotFound(f"no module {partial!r} {where}")
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
    if found is None and name not in parsed.names and "__getattr__" not in path.read_text(encoding="utf-8"):
        classes = [n for n, entry in parsed.names.items() if isinstance(entry, ast.ClassDef) and not n.startswith("_")]
        raise NotFound(
            f"no class {name!r} in {_short(path)}" + (f"; it has {', '.join(classes[:8])}" if classes else "")
        )
    return None


def _member(module: str, name: str, depth: int) -> ClassSource | tuple[Module, ast.expr] | str | None:
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


# ---- what a class takes


def signature(source: ClassSource, depth: int = _DEPTH) -> Signature:
    """The arguments of a class's constructor: its own, its fields, or those of its first base that has one."""
    if any(_last_name(d.func if isinstance(d, ast.Call) else d) == "dataclass" for d in source.node.decorator_list):
        return _dataclass_signature(source, depth)
    init = _method(source.node, "__init__")
    if init is not None:
        return _function_signature(init, source.module)
    if _last_name_is(source.node.bases, "NamedTuple"):
        return _dataclass_signature(source, depth)
    for base in source.node.bases:
        if isinstance(base, ast.Subscript):
            base = base.value
        if _last_name(base) in _WITHOUT_ARGUMENTS:
            continue
        found = source.module.look_up(_dotted(base) or "")
        if not isinstance(found, ClassSource) or depth <= 0:
            return Signature(accepts_any=True)
        inherited = signature(found, depth - 1)
        if inherited.arguments or inherited.positional or inherited.accepts_any:
            return inherited
    return Signature()


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    found = None
    for part in node.body:
        for statement in [part, *getattr(part, "body", []), *getattr(part, "orelse", [])]:
            if isinstance(statement, ast.FunctionDef) and statement.name == name:
                found = statement  # the last one: overloads come first
    return found


def _function_signature(function: ast.FunctionDef, module: Module) -> Signature:
    a = function.args
    positional = [*a.posonlyargs, *a.args][1:]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(a.defaults)) + list(a.defaults)
    defaults = defaults[len(defaults) - len(positional) :]
    pairs = [*zip(positional, defaults, strict=True), *zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    arguments = {arg.arg: _argument(arg.arg, arg.annotation, default, module) for arg, default in pairs}
    return Signature(tuple(arg.arg for arg in positional), arguments, a.kwarg is not None)


def _dataclass_signature(source: ClassSource, depth: int) -> Signature:
    arguments: dict[str, Argument] = {}
    for base in source.node.bases:
        found = source.module.look_up(_dotted(base) or "")
        if isinstance(found, ClassSource) and depth > 0:
            arguments.update(signature(found, depth - 1).arguments)
    for part in source.node.body:
        if not isinstance(part, ast.AnnAssign) or not isinstance(part.target, ast.Name):
            continue
        head = part.annotation.value if isinstance(part.annotation, ast.Subscript) else part.annotation
        if _last_name(head) == "ClassVar":
            continue
        name, default = part.target.id, part.value
        argument = _argument(name, part.annotation, default, source.module)
        if isinstance(default, ast.Call) and _last_name(default.func) == "field":
            given = {keyword.arg: keyword.value for keyword in default.keywords}
            if isinstance(given.get("init"), ast.Constant) and given["init"].value is False:
                continue
            argument = _argument(name, part.annotation, given.get("default"), source.module)
            if "default_factory" in given:
                argument = Argument(name, argument.type, required=False)
        arguments[name] = argument
    return Signature(tuple(arguments), arguments)


def _argument(name: str, annotation: ast.expr | None, default: ast.expr | None, module: Module) -> Argument:
    kind = Any if annotation is None else read_type(annotation, module)
    if default is None:
        return Argument(name, kind, required=True)
    return Argument(name, kind, required=False, default=_literal(default, module))


def _literal(node: ast.expr, module: Module) -> Any:
    """A default's value, if it is a literal or the name of one."""
    name = _dotted(node)
    if name:
        found = module.look_up(name)
        if isinstance(found, tuple):
            module, node = found
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return MISSING


# ---- annotations


def read_type(node: ast.expr, module: Module, depth: int = _DEPTH) -> Any:
    """An annotation as a typing object. What is no plain data (a Tensor, a callable) is Any, and left out of unions."""
    if depth <= 0:
        return Any
    if isinstance(node, ast.Constant):
        if node.value is None:
            return type(None)
        if isinstance(node.value, str):
            try:
                return read_type(ast.parse(node.value, mode="eval").body, module, depth - 1)
            except SyntaxError:
                return Any
        return Any
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([read_type(node.left, module, depth - 1), read_type(node.right, module, depth - 1)])
    if isinstance(node, ast.Subscript):
        inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        return _generic(_last_name(node.value), inner, module, depth)
    name = _dotted(node)
    if not name:
        return Any
    found = module.look_up(name)
    if isinstance(found, tuple):
        return read_type(found[1], found[0], depth - 1)
    last = name.rpartition(".")[2]
    if isinstance(found, ClassSource):
        return Any
    return _PLAIN.get(last) or _GENERIC.get(last) or Any


def _generic(head: str, inner: list[ast.expr], module: Module, depth: int) -> Any:
    if head == "Literal":
        values = []
        for part in inner:
            value = _literal(part, module)
            if value is MISSING:
                return Any
            values.append(value)
        return Literal[tuple(values)]
    if head == "Annotated":
        base = read_type(inner[0], module, depth - 1)
        constraints = [c for part in inner[1:] for c in _constraints(part, module)]
        return Annotated[(base, *constraints)] if constraints else base
    types = [
        ... if isinstance(part, ast.Constant) and part.value is ... else read_type(part, module, depth - 1)
        for part in inner
    ]
    if head == "Union":
        return _union(types)
    if head == "Optional":
        return _union([types[0], type(None)])
    if head in ("Final", "InitVar"):
        return types[0]
    kind = _GENERIC.get(head)
    if kind is tuple:
        return tuple[tuple(types)]
    if kind is list:
        return list[types[0]]
    return dict if kind is dict else Any


def _union(types: list[Any]) -> Any:
    known = [kind for kind in types if kind is not Any]
    if not any(kind is not type(None) for kind in known):
        return Any
    return Union[tuple(known)]  # noqa: UP007 - built at run time


def _constraints(node: ast.expr, module: Module) -> list[Any]:
    if not isinstance(node, ast.Call):
        return []
    name = _last_name(node.func)
    values = [_literal(part, module) for part in node.args]
    named = {keyword.arg: _literal(keyword.value, module) for keyword in node.keywords}
    if MISSING in values or MISSING in named.values():
        return []
    if name in _CONSTRAINTS and len(values) + len(named) == 1:
        return [getattr(annotated_types, name)((values or list(named.values()))[0])]
    if name in ("Interval", "Field"):
        known = {"ge": "Ge", "gt": "Gt", "le": "Le", "lt": "Lt", "multiple_of": "MultipleOf"}
        return [getattr(annotated_types, known[key])(value) for key, value in named.items() if key in known]
    return []


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value)
        return f"{head}.{node.attr}" if head else None
    return None


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        node = node.value
    return (_dotted(node) or "").rpartition(".")[2]


def _last_name_is(nodes: list[ast.expr], name: str) -> bool:
    return any(_last_name(node) == name for node in nodes)

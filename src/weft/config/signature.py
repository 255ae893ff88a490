"""Signatures of a class's constructor and methods, read from source.

griffe 2.4 is too slow for this: its import takes 0.06 to 0.15 s of the 0.35 s of `weft config check`, and it loads a
full package for one module (1.1 s for weft, 24 s for torch).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal, Union

import annotated_types
from pydantic import Field

from weft.config.python_source import DEPTH, ClassSource, Module, dotted_name, last_name

_TYPES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, bool, str)},
    **dict.fromkeys(("list", "List", "Sequence", "Iterable", "Collection"), list),
    **dict.fromkeys(("tuple", "Tuple"), tuple),
    **dict.fromkeys(("dict", "Dict", "Mapping", "MutableMapping"), dict),
}
_BOUNDS = ("Ge", "Gt", "Le", "Lt", "MultipleOf", "MinLen", "MaxLen", "Interval", "Len")
_WITHOUT_ARGUMENTS = {"object", "ABC", "Generic", "Protocol", "Module"}


class _Missing(Enum):
    """No default, or none that the source shows. An Enum, because a copy of its member is the same object."""

    MISSING = "missing"


MISSING = _Missing.MISSING


@dataclass(frozen=True)
class Argument:
    """An argument of a constructor. `type` is a typing object, or Any if the source does not show one."""

    name: str
    type: Any
    required: bool
    default: Any = MISSING


@dataclass(frozen=True)
class Signature:
    """Arguments of a constructor or method, without `self`.

    Attributes:
        positional: names of the positional arguments, in order.
        arguments: all arguments, by name.
        accepts_any: whether there is a `**kwargs`, or the source cannot be read.
        any_positional: whether there is an `*args`, or the source cannot be read.
    """

    positional: tuple[str, ...] = ()
    arguments: dict[str, Argument] = field(default_factory=dict)
    accepts_any: bool = False
    any_positional: bool = False


_ANY = Signature(accepts_any=True, any_positional=True)


def signature(source: ClassSource, depth: int = DEPTH) -> Signature:
    """Returns the signature of a class's constructor, which may be inherited or made by `@dataclass`."""
    for each in _lineage(source, depth):
        if each is None:
            return _ANY
        if (init := _method(each.node, "__init__")) is not None:
            return _of_function(init, each.module)
        decorators = [d.func if isinstance(d, ast.Call) else d for d in each.node.decorator_list]
        if "dataclass" in map(last_name, decorators) or "NamedTuple" in each.bases:
            return _of_dataclass(each, depth)
    return Signature()


def method_signature(source: ClassSource, name: str) -> Signature | None:
    """Returns the signature of a method, which may be inherited; None if there is none.

    A base class that cannot be read may have the method, with any arguments.
    """
    for each in _lineage(source):
        if each is None:
            return _ANY
        if (method := _method(each.node, name)) is not None:
            return _of_function(method, each.module)
    return None


def has_attribute(source: ClassSource, name: str) -> bool | None:
    """Whether a class or one of its bases defines a name; None if a base cannot be read."""
    classes = list(_lineage(source))
    for each in filter(None, classes):
        for part in each.node.body:
            targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return True
        if _method(each.node, name) is not None:
            return True
    return None if None in classes else False


def _lineage(source: ClassSource, depth: int = DEPTH) -> Iterator[ClassSource | None]:
    """Yields a class and its bases, depth first; None for a base that cannot be read."""
    yield source
    for base in source.node.bases:
        if last_name(base) in _WITHOUT_ARGUMENTS:
            continue
        found = source.module.resolve(dotted_name(base.value if isinstance(base, ast.Subscript) else base) or "")
        if isinstance(found, ClassSource) and depth > 0:
            yield from _lineage(found, depth - 1)
        else:
            yield None


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    found = None
    for part in node.body:
        for statement in [part, *getattr(part, "body", []), *getattr(part, "orelse", [])]:
            if isinstance(statement, ast.FunctionDef) and statement.name == name:
                found = statement  # the last one, after overloads
    return found


def _of_function(function: ast.FunctionDef, module: Module) -> Signature:
    a = function.args
    positional = [*a.posonlyargs, *a.args]
    defaults = [*[None] * (len(positional) - len(a.defaults)), *a.defaults]
    pairs = [*zip(positional[1:], defaults[1:], strict=True), *zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    arguments = {arg.arg: _argument(arg.arg, arg.annotation, default, module) for arg, default in pairs}
    return Signature(tuple(arg.arg for arg in positional[1:]), arguments, a.kwarg is not None, a.vararg is not None)


def _of_dataclass(source: ClassSource, depth: int) -> Signature:
    arguments: dict[str, Argument] = {}
    for base in source.node.bases:
        found = source.module.resolve(dotted_name(base) or "")
        if isinstance(found, ClassSource) and depth > 0:
            arguments.update(signature(found, depth - 1).arguments)
    for part in source.node.body:
        if not isinstance(part, ast.AnnAssign) or not isinstance(part.target, ast.Name):
            continue
        name, default = part.target.id, part.value
        given: dict[str | None, ast.expr] = {}
        if isinstance(default, ast.Call) and last_name(default.func) == "field":
            given = {keyword.arg: keyword.value for keyword in default.keywords}
            default = given.get("default", given.get("default_factory"))
        made = "init" not in given or _literal(given["init"], source.module)
        if made and last_name(part.annotation) != "ClassVar":
            arguments[name] = _argument(name, part.annotation, default, source.module)
    return Signature(tuple(arguments), arguments)


def _argument(name: str, annotation: ast.expr | None, default: ast.expr | None, module: Module) -> Argument:
    kind = Any if annotation is None else read_type(annotation, module)
    return Argument(name, kind, default is None, MISSING if default is None else _literal(default, module))


def _literal(node: ast.AST, module: Module) -> Any:
    """Returns the value of a literal, or of a name that is assigned one; else MISSING."""
    found = module.resolve(dotted_name(node) or "")
    try:
        return ast.literal_eval(found[1] if isinstance(found, tuple) else node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return MISSING


def read_type(node: ast.expr, module: Module, depth: int = DEPTH) -> Any:
    """Returns an annotation as a typing object. Other types than plain data (a Tensor, a callable) become Any."""
    if depth <= 0:
        return Any
    if isinstance(node, ast.Constant) and node.value is None:
        return type(None)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return read_type(ast.parse(node.value, mode="eval").body, module, depth - 1)
        except SyntaxError:
            return Any
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([read_type(node.left, module, depth - 1), read_type(node.right, module, depth - 1)])
    if isinstance(node, ast.Subscript):
        inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        return _generic(last_name(node.value), inner, module, depth - 1)
    found = module.resolve(dotted_name(node) or "")
    if isinstance(found, tuple) and isinstance(found[1], ast.expr):
        return read_type(found[1], found[0], depth - 1)
    return Any if isinstance(found, ClassSource) else _TYPES.get(last_name(node), Any)


def _generic(head: str, inner: list[ast.expr], module: Module, depth: int) -> Any:
    if head == "Literal":
        values = tuple(_literal(part, module) for part in inner)
        return Any if MISSING in values else Literal[values]
    if head == "Annotated":
        bounds = [bound for part in inner[1:] for bound in _bounds(part, module)]
        base = read_type(inner[0], module, depth)
        return Annotated[(base, *bounds)] if bounds else base
    ellipsis = ast.dump(ast.Constant(...))
    types = [... if ast.dump(part) == ellipsis else read_type(part, module, depth) for part in inner]
    if head in ("Union", "Optional"):
        return _union([*types, type(None)] if head == "Optional" else types)
    if head in ("Final", "InitVar"):
        return types[0]
    kind = _TYPES.get(head, Any)
    if kind is dict and len(types) == 2:
        return dict[str, types[1]]
    return kind.__class_getitem__(tuple(types)) if kind in (list, tuple) else kind


def _union(types: list[Any]) -> Any:
    known = [kind for kind in types if kind is not Any]
    if not any(kind is not type(None) for kind in known):
        return Any
    return Union[tuple(known)]  # noqa: UP007 - built at run time


def _bounds(node: ast.expr, module: Module) -> list[Any]:
    """Returns the bounds that a part of `Annotated` sets."""
    name = last_name(node.func) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or name not in (*_BOUNDS, "Field"):
        return []
    values = [_literal(part, module) for part in node.args]
    named = {str(keyword.arg): _literal(keyword.value, module) for keyword in node.keywords}
    try:
        if MISSING in values or MISSING in named.values():
            return []
        made = Field(**named) if name == "Field" else getattr(annotated_types, name)(*values, **named)
    except TypeError:
        return []
    if name == "Field":
        return made.metadata
    return list(made) if isinstance(made, annotated_types.GroupedMetadata) else [made]

"""What a class's constructor takes, read from its source."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union

import annotated_types

from weft.config.source import DEPTH, ClassSource, Module, any_named, dotted, last_name

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
        any_positional: so with `*args`.
    """

    positional: tuple[str, ...] = ()
    arguments: dict[str, Argument] = field(default_factory=dict)
    accepts_any: bool = False
    any_positional: bool = False


def signature(source: ClassSource, depth: int = DEPTH) -> Signature:
    """The arguments of a class's constructor: its own, its fields, or those of its first base that has one."""
    init = _method(source.node, "__init__")
    if init is not None:
        return _function_signature(init, source.module)
    decorators = [d.func if isinstance(d, ast.Call) else d for d in source.node.decorator_list]
    if any_named(decorators, "dataclass") or any_named(source.node.bases, "NamedTuple"):
        return _dataclass_signature(source, depth)
    for base in source.node.bases:
        if isinstance(base, ast.Subscript):
            base = base.value
        if last_name(base) in _WITHOUT_ARGUMENTS:
            continue
        found = source.module.look_up(dotted(base) or "")
        if not isinstance(found, ClassSource) or depth <= 0:
            return Signature(accepts_any=True, any_positional=True)
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


def method_arguments(source: ClassSource, name: str) -> frozenset[str] | None:
    """The names that a method takes; None if it is not written in the class itself, or takes any."""
    method = _method(source.node, name)
    if method is None or method.args.kwarg is not None:
        return None
    return frozenset(arg.arg for arg in (*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs))


def method_signature(source: ClassSource, name: str, depth: int = DEPTH) -> Signature | None:
    """The arguments of a class's method, its own or inherited, without `self`; None if it has none.

    Where a base cannot be read, it may have any: `accepts_any` and `any_positional`.
    """
    method = _method(source.node, name)
    if method is not None:
        return _function_signature(method, source.module)
    for base in source.node.bases:
        if isinstance(base, ast.Subscript):
            base = base.value
        if last_name(base) in _WITHOUT_ARGUMENTS:
            continue
        found = source.module.look_up(dotted(base) or "")
        if not isinstance(found, ClassSource) or depth <= 0:
            return Signature(accepts_any=True, any_positional=True)
        inherited = method_signature(found, name, depth - 1)
        if inherited is not None:
            return inherited
    return None


def has_attribute(source: ClassSource, name: str, depth: int = DEPTH) -> bool | None:
    """Whether a class's body, or a base's, gives a name a value or a function; None where a base cannot be read."""
    if _method(source.node, name) is not None:
        return True
    for part in source.node.body:
        targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return True
    told: bool | None = False
    for base in source.node.bases:
        if last_name(base) in _WITHOUT_ARGUMENTS:
            continue
        found = source.module.look_up(dotted(base) or "")
        inherited = has_attribute(found, name, depth - 1) if isinstance(found, ClassSource) and depth > 0 else None
        if inherited:
            return True
        told = None if inherited is None else told
    return told


def _function_signature(function: ast.FunctionDef, module: Module) -> Signature:
    a = function.args
    positional = [*a.posonlyargs, *a.args][1:]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(a.defaults)) + list(a.defaults)
    defaults = defaults[len(defaults) - len(positional) :]
    pairs = [*zip(positional, defaults, strict=True), *zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    arguments = {arg.arg: _argument(arg.arg, arg.annotation, default, module) for arg, default in pairs}
    return Signature(tuple(arg.arg for arg in positional), arguments, a.kwarg is not None, a.vararg is not None)


def _dataclass_signature(source: ClassSource, depth: int) -> Signature:
    arguments: dict[str, Argument] = {}
    for base in source.node.bases:
        found = source.module.look_up(dotted(base) or "")
        if isinstance(found, ClassSource) and depth > 0:
            arguments.update(signature(found, depth - 1).arguments)
    for part in source.node.body:
        if not isinstance(part, ast.AnnAssign) or not isinstance(part.target, ast.Name):
            continue
        head = part.annotation.value if isinstance(part.annotation, ast.Subscript) else part.annotation
        if last_name(head) == "ClassVar":
            continue
        name, default = part.target.id, part.value
        argument = _argument(name, part.annotation, default, source.module)
        if isinstance(default, ast.Call) and last_name(default.func) == "field":
            given = {keyword.arg: keyword.value for keyword in default.keywords}
            if _is_false(given.get("init")):
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


def _literal(node: ast.AST, module: Module) -> Any:
    """A default's value, if it is a literal or the name of one."""
    name = dotted(node)
    if name:
        found = module.look_up(name)
        if isinstance(found, tuple):
            module, node = found
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return MISSING


# ---- annotations


def read_type(node: ast.AST, module: Module, depth: int = DEPTH) -> Any:
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
        return _generic(last_name(node.value), inner, module, depth)
    name = dotted(node)
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
    name = last_name(node.func)
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


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False

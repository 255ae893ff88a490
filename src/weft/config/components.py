"""Finds the class of a component chosen by `type:`, and the arguments of its constructor.

A built-in component is the first public class of its file: `type: muon` selects the class in `weft/optim/muon.py`. A
custom component is named by `type: module:Class`. Weft passes the first arguments of `__init__` by position (for
example, the parameters to an optimizer). Each other argument is a configuration key, whose type is the argument's
annotation.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic_core import PydanticCustomError

from weft.config.python_source import ClassSource, Module, ModuleMissing, NotFound, find_class
from weft.config.section import Component, Section
from weft.config.signature import MISSING, Argument, has_attribute, method_signature, signature
from weft.config.suggest import did_you_mean
from weft.errors import UserError
from weft.plugins import plugins, unknown_kind_hint

_PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class ComponentKind:
    """What Weft requires of the components of one kind, such as optimizers.

    Attributes:
        folder: folder of the built-in components, below `src/weft`; None if all components are custom.
        injected: names of the arguments that Weft passes by position, before the configuration keys.
        methods: name of a method -> names of the positional arguments that Weft passes. A custom class must have at
            least one of these methods.
        needs: names of further methods that the class must have. The entry "a or b" requires only one of the two.
    """

    folder: str | None
    injected: tuple[str, ...] = ()
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


def _called(*arguments: str) -> dict[str, tuple[str, ...]]:
    """Returns `ComponentKind.methods` for components that Weft calls like a function.

    The class of such a component must define `__call__` or, if it is an nn.Module, `forward`.

    Args:
        arguments: names of the positional arguments of the call.
    """
    return {"__call__": arguments, "forward": arguments}


_HOOKS = ("begin", "step", "saved", "validating", "validated", "ended")
COMPONENT_KINDS = {
    "optimizer": ComponentKind("optim", ("params",), needs=("step", "zero_grad")),
    "schedule": ComponentKind("optim/schedules", ("total_steps",), needs=("__call__",)),
    "objective": ComponentKind("objectives", needs=("weight", "inputs or compute", "loss or compute")),
    "tracker": ComponentKind("observe/trackers", ("run",), needs=("log", "text", "close")),
    "callback": ComponentKind("train/callbacks", methods=dict.fromkeys(_HOOKS, ("state",))),
    "metric": ComponentKind(None, methods={"step": ("state",), "outputs": ("outputs", "batch")}),
    "model": ComponentKind(None),
    "dataset": ComponentKind(None, needs=("__len__", "__getitem__")),
    "attention_pattern": ComponentKind("kernels/patterns", (), _called("query", "key")),
    "attention": ComponentKind(None, ("config",), _called("q", "k", "v", "mask")),
    "norm": ComponentKind(None, ("width", "eps"), _called("x")),
    "activation": ComponentKind(None, (), _called("x")),
    "position": ComponentKind(None, ("config",), {"embed": ("x", "positions"), "forward": ("q", "k", "positions")}),
    "initialization": ComponentKind(None, (), _called("name", "shape", "role", "generator", "config")),
}


@dataclass(frozen=True, eq=False)
class ComponentClass:
    """The class of a component, as read from its source.

    Attributes:
        module: dotted name of the module.
        name: name of the class.
        arguments: arguments that are configuration keys, by name.
        injected: names of the arguments that Weft passes by position.
        accepts_any: whether keys that are not in `arguments` are accepted too, because the constructor has `**kwargs`
            or its source cannot be read.
        doc: docstring of the class.
    """

    module: str
    name: str
    arguments: dict[str, Argument]
    injected: tuple[str, ...]
    accepts_any: bool
    doc: str


@cache
def built_ins(kind: str) -> dict[str, str]:
    """Returns the built-in components of a kind: short name -> dotted name of the module."""
    folder = COMPONENT_KINDS[kind].folder
    paths = sorted((_PACKAGE / folder).glob("[!_]*.py")) if folder is not None else []
    found = {path.stem: _built_in_class(kind, path) for path in paths}
    return {name: source.module.name for name, source in found.items() if source is not None}


def _built_in_class(kind: str, path: Path) -> ClassSource | None:
    """Returns the component class in a file; None if the file defines only helpers or a Protocol."""
    chosen = COMPONENT_KINDS[kind]
    source = Module.parse(f"weft.{(chosen.folder or '').replace('/', '.')}.{path.stem}", path).first_public_class()
    if source is None or "Protocol" in source.bases:
        return None
    takes = signature(source).positional
    return source if takes[: len(chosen.injected)] == chosen.injected else None


def find_component(type_: str, kind: str) -> ComponentClass:
    """Returns the class that a `type:` names. Reads the class from its source file, without importing it.

    Args:
        type_: the value of `type`.
        kind: a key of `COMPONENT_KINDS`.

    Raises:
        UserError: the component does not exist, or its methods do not have the arguments that Weft passes. For an
            unknown name, the message lists the known names.
    """
    module, name = _locate(type_, kind)
    if name is None:
        return _built_in(module, kind)
    try:
        source = find_class(module, name)
    except NotFound as error:
        hint = _module_hint(module) if isinstance(error, ModuleMissing) else ""
        raise UserError(f"{type_!r}: {error}{hint}") from None
    return ComponentClass(module, name, {}, (), True, "") if source is None else _component_class(source, type_, kind)


@cache
def _built_in(module: str, kind: str) -> ComponentClass:
    source = _built_in_class(kind, _PACKAGE / (COMPONENT_KINDS[kind].folder or "") / f"{module.split('.')[-1]}.py")
    assert source is not None
    return _component_class(source, module, kind)


def _component_class(source: ClassSource, type_: str, kind: str) -> ComponentClass:
    chosen, name, takes = COMPONENT_KINDS[kind], source.node.name, signature(source)
    injected = takes.positional[: len(chosen.injected)]
    if len(injected) < len(chosen.injected) and not takes.any_positional:
        expected = ", ".join(chosen.injected)
        raise UserError(
            f"{type_!r}: Weft calls {name}({expected}, ...), but __init__ takes {', '.join(injected) or 'no argument'} "
            f"by position; define it as __init__(self, {expected}, ...)"
        )
    if missing := _missing_method(kind, lambda method: has_attribute(source, method) is not False):
        raise UserError(f"{type_!r}: {name} ({source.place}) has no method {missing}; add it")
    _check_methods(type_, source, chosen.methods)
    arguments = {key: argument for key, argument in takes.arguments.items() if key not in injected}
    return ComponentClass(source.module.name, name, arguments, injected, takes.accepts_any, source.doc)


def misspelled_methods(type_: str, kind: str) -> list[tuple[str, str]]:
    """Returns pairs (method of a custom class, similar method that Weft would call and that the class lacks)."""
    module, name = _locate(type_, kind)
    source = None if name is None else find_class(module, name)
    own = [node.name for node in source.node.body if isinstance(node, ast.FunctionDef)] if source is not None else []
    hooks = [hook for hook in COMPONENT_KINDS[kind].methods if hook not in own]
    near = {name: get_close_matches(name.removeprefix("on_"), hooks, 1, cutoff=0.8) for name in own if name[0] != "_"}
    return [(name, found[0]) for name, found in near.items() if found and name not in COMPONENT_KINDS[kind].methods]


class _Arguments(Section):
    model_config = ConfigDict(populate_by_name=False)


class _AnyArguments(Section):
    model_config = ConfigDict(populate_by_name=False, extra="allow")


@lru_cache(maxsize=256)
def arguments_model(
    section: type[Component], chosen: ComponentClass | None, wrong: str | None = None
) -> type[BaseModel]:
    """Returns the pydantic model that validates a component: the keys of its section and the arguments of its class.

    Args:
        section: the section class of the component's kind.
        chosen: the class of the component. None: the class is not known, and any argument is accepted.
        wrong: the error message to report for `type`; None if `type` is valid.
    """
    fields: dict[str, Any] = {name: (info.annotation, info) for name, info in section.model_fields.items()}
    if wrong is not None:
        fields["type"] = (Annotated[str, _refuse(wrong)], fields["type"][1].default)
    for number, (name, argument) in enumerate(chosen.arguments.items() if chosen is not None else ()):
        kind, default = argument.type, ... if argument.required else _as_type(argument.default, argument.type)
        if kind is Any and isinstance(default, tuple):
            kind = Annotated[Any, AfterValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
        fields[f"argument_{number}"] = (kind, Field(default, alias=name))
    class_name = chosen.name if chosen is not None else ""
    for name in chosen.injected if chosen is not None else ():
        refused = _refuse(f"Weft itself passes {name} to {class_name}; remove the key")
        fields[f"injected_{name}"] = (Annotated[Any, refused], Field(MISSING, alias=name))
    base = _AnyArguments if chosen is None or chosen.accepts_any else _Arguments
    return create_model(section.__name__, __base__=base, **fields)


def _refuse(what: str) -> AfterValidator:
    def refuse(_: Any) -> Any:
        raise PydanticCustomError("custom", "{what}", {"what": what})

    return AfterValidator(refuse)


def _as_type(default: Any, kind: Any) -> Any:
    """Converts the integers in an argument's default to floats where the annotation `kind` has float: 0 becomes 0.0."""
    if "float" not in str(kind) or isinstance(default, float):
        return default
    try:
        return TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(default)
    except ValidationError:
        return default


def _missing_method(kind: str, has: Callable[[str], bool]) -> str | None:
    """Returns the first requirement in the kind's `needs` that a class does not fulfill; None if it fulfills all.

    Args:
        kind: a key of `COMPONENT_KINDS`.
        has: returns whether the class has the method of a given name.
    """
    return next((need for need in COMPONENT_KINDS[kind].needs if not any(map(has, need.split(" or ")))), None)


def _check_methods(type_: str, source: ClassSource, methods: Mapping[str, tuple[str, ...]]) -> None:
    """Raises UserError if a class has none of `methods`, or if the signature of one of them does not match Weft's call.

    Reads the source of the class; does not import it.
    """
    found = {name: method_signature(source, name) for name in methods}
    if methods and not any(found.values()):
        expected = " or ".join(f"{name}({', '.join(given)})" for name, given in methods.items())
        raise UserError(f"{type_!r}: {source.node.name} ({source.place}) has no method {expected}; add it")
    for name, given in methods.items():
        takes = found[name]
        if takes is None:
            continue
        required = {key for key, argument in takes.arguments.items() if argument.required}
        too_few = len(takes.positional) < len(given) and not takes.any_positional
        if too_few or required - set(takes.positional[: len(given)]):
            raise UserError(
                f"{type_!r}: Weft calls {name}({', '.join(given)}), but the class ({source.place}) has "
                f"{name}({', '.join(takes.arguments)}); change the method's arguments to those of the call"
            )


def _locate(type_: str, kind: str) -> tuple[str, str | None]:
    """Returns the module and the class name of a `type:`. The class name is None for a built-in component.

    The name of a plugin is resolved to its `module:Class`.

    Args:
        type_: the value of `type`.
        kind: a key of `COMPONENT_KINDS`.
    """
    module, colon, name = type_.partition(":")
    if colon:
        if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            remedy = "write the module as in an import statement, such as my_package.module:MyClass"
            raise UserError(f"{type_!r} is not a module:Class; {remedy}")
        return module, name
    known, short = built_ins(kind), type_.replace("-", "_")
    if short in known:
        return known[short], None
    if (plugin := plugins(kind).get(type_)) is not None:
        if ":" not in plugin.reference:
            what = f"{type_!r}: the entry point {kind}.{type_} of {plugin.package} is {plugin.reference!r}"
            raise UserError(f"{what}, which does not name a class; set the entry point to module:Class")
        return _locate(plugin.reference, kind)
    custom = "write a custom class as module:Class"
    if kind == "model":
        custom = f"use decoder or hf, or {custom}"
    if not known:
        raise UserError(f"unknown {kind} {type_!r}; {custom}")
    names = [*known, *plugins(kind)]
    near = did_you_mean(short, names)
    raise UserError(
        f"unknown {kind} {type_!r}{near} (use one of {', '.join(names)}; {custom}){unknown_kind_hint(type_)}"
    )


def _module_hint(module: str) -> str:
    """Returns a hint for a missing module: a similar name in the working directory, or where to put the module."""
    here = [path.stem for path in Path.cwd().glob("*.py")]
    if module in here or (Path.cwd() / module.split(".")[0]).exists():
        return ""
    near = did_you_mean(module, here, cutoff=0.75)
    return near or "; put it in the working directory or on PYTHONPATH"


def load_class(chosen: str | Component, kind: str) -> type:
    """Imports and returns the class that a `type:` names. Adds the working directory to the import path for custom
    classes.

    Args:
        chosen: the value of `type`, or the section that has the key `type`.
        kind: a key of `COMPONENT_KINDS`.

    Raises:
        UserError: the module or class does not exist, or the class lacks a method that its kind needs. For a section,
            the message says where its `type` is set.
    """
    type_, place = (chosen, None) if isinstance(chosen, str) else (chosen.type, chosen.place)
    module, name = _locate(type_, kind)
    if name is None:
        name = find_component(type_, kind).name
    elif (here := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        missing = f"no module {error.name!r}"
        raise UserError(f"{type_!r}: {missing}; install it, or put its folder on PYTHONPATH", place) from error
    if found is not None and not isinstance(found, type):
        raise UserError(f"{type_!r} is a {type(found).__name__}, not a class; set type to the name of a class", place)
    if found is None:
        raise UserError(f"{type_!r}: the module {module!r} has no class {name!r}; check the name", place)
    if missing := _missing_method(kind, lambda method: callable(getattr(found, method, None))):
        what = f"has no method {missing}, which every {kind} needs; see docs/own-components.md"
        raise UserError(f"{type_!r}: {name} {what}", place)
    return found


def make_component(section: Component, kind: str, *arguments: Any) -> Any:
    """Returns an instance of the class that a section names.

    Args:
        section: section whose `type` names the class, and whose other keys are keyword arguments.
        kind: a key of `COMPONENT_KINDS`.
        arguments: positional arguments.
    """
    return load_class(section, kind)(*arguments, **section.arguments)

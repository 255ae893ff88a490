"""Parts chosen by `type:`: where they are found, and what their constructors take.

A built-in is a file: `type: muon` is the first public class of `weft/optim/muon.py`. A part of the user's own is
`module:Class`. Weft gives the first arguments itself (an optimizer's parameters, say); every other argument of
`__init__` is a configuration key, with its annotation as type and its default.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic_core import PydanticCustomError

from weft.config.python_source import ClassSource, Module, NoModule, NotFound, find_class
from weft.config.section import Component, Section
from weft.config.signature import MISSING, Argument, method_signature, signature
from weft.config.suggest import did_you_mean
from weft.errors import UserError
from weft.plugins import plugins, unknown_kind_hint

_PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Room:
    """One kind of part.

    Attributes:
        folder: of the built-ins, below `src/weft`; None if all are the user's own.
        injected: what Weft gives by position, before the configuration keys.
        methods: what Weft calls a part of the user's own by, and what it gives by position. One of them must be there.
        needs: methods that must all be there: without one, a run would end in the middle of something else.
    """

    folder: str | None
    injected: tuple[str, ...] = ()
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


def _called(*arguments: str) -> dict[str, tuple[str, ...]]:
    """The methods of what is called as a function: a class's, or an nn.Module's."""
    return {"__call__": arguments, "forward": arguments}


_HOOKS = ("begin", "step", "saved", "validating", "validated", "ended")
ROOMS = {
    "optimizer": Room("optim", ("params",), needs=("step", "zero_grad", "state_dict", "load_state_dict")),
    "schedule": Room("optim/schedules", ("total_steps",), needs=("__call__",)),
    "objective": Room("objectives", needs=("inputs", "weight", "loss")),
    "tracker": Room("observe/trackers", ("run",), needs=("log", "text", "close")),
    "callback": Room("train/callbacks", methods=dict.fromkeys(_HOOKS, ("state",))),
    "metric": Room(None, methods={"step": ("state",), "outputs": ("outputs", "batch")}),
    "model": Room(None),
    "dataset": Room(None, needs=("__len__", "__getitem__")),
    "attention_pattern": Room("kernels/patterns", (), _called("query", "key")),
    "attention": Room(None, ("config",), _called("q", "k", "v", "mask")),
    "norm": Room(None, ("width", "eps"), _called("x")),
    "activation": Room(None, (), _called("x")),
    "position": Room(None, ("config",), {"embed": ("x", "positions"), "forward": ("q", "k", "positions")}),
    "initialization": Room(None, (), _called("name", "shape", "role", "generator", "config")),
}


@dataclass(frozen=True, eq=False)
class Part:
    """A component's class, as far as its source tells.

    Attributes:
        arguments: the configuration keys.
        injected: names of the arguments that Weft gives.
        accepts_any: other keys are taken too.
    """

    module: str
    name: str
    arguments: dict[str, Argument]
    injected: tuple[str, ...]
    accepts_any: bool
    doc: str


@cache
def built_ins(room: str) -> dict[str, str]:
    """Short names of a room's built-in parts -> their modules."""
    folder = ROOMS[room].folder
    if folder is None:
        return {}
    found = {}
    for path in sorted((_PACKAGE / folder).glob("*.py")):
        source = None if path.name.startswith("_") else _built_in_class(room, path)
        if source is not None:
            found[path.stem] = source.module.name
    return found


def _built_in_class(room: str, path: Path) -> ClassSource | None:
    """The part that a file holds; None for a file of helpers, or of the interface that parts meet."""
    chosen = ROOMS[room]
    source = Module.parse(f"weft.{(chosen.folder or '').replace('/', '.')}.{path.stem}", path).first_public_class()
    if source is None or "Protocol" in source.bases:
        return None
    takes = signature(source).positional
    return source if takes[: len(chosen.injected)] == chosen.injected else None


def find_part(type_: str, room: str) -> Part:
    """What a `type:` means, read from source; nothing is imported.

    Raises:
        UserError: no such part; says what there is.
    """
    module, name = _locate(type_, room)
    if name is None:
        return _built_in(module, room)
    try:
        source = find_class(module, name)
    except NotFound as error:
        hint = _hint(module) if isinstance(error, NoModule) else ""
        raise UserError(f"{type_!r}: {error}{hint}") from None
    return Part(module, name, {}, (), True, "") if source is None else _part_of(source, type_, room)


@cache
def _built_in(module: str, room: str) -> Part:
    source = _built_in_class(room, _PACKAGE / (ROOMS[room].folder or "") / f"{module.split('.')[-1]}.py")
    assert source is not None
    return _part_of(source, module, room)


def _part_of(source: ClassSource, type_: str, room: str) -> Part:
    chosen, name, takes = ROOMS[room], source.node.name, signature(source)
    injected = takes.positional[: len(chosen.injected)]
    if len(injected) < len(chosen.injected) and not takes.any_positional:
        raise UserError(
            f"{type_!r}: Weft makes it as {name}({', '.join(chosen.injected)}, ...), "
            f"but it takes {', '.join(injected) or 'no argument'} by position; "
            f"begin its __init__ with self, {', '.join(chosen.injected)}"
        )
    _check_methods(type_, source, chosen.methods)
    arguments = {key: argument for key, argument in takes.arguments.items() if key not in injected}
    return Part(source.module.name, name, arguments, injected, takes.accepts_any, source.doc)


class _Arguments(Section):
    model_config = ConfigDict(populate_by_name=False)


class _AnyArguments(Section):
    model_config = ConfigDict(populate_by_name=False, extra="allow")


@lru_cache(maxsize=256)
def arguments_model(section: type[Component], part: Part | None, wrong: str | None = None) -> type[BaseModel]:
    """What validates a component: the section's own keys, and its class's arguments.

    Args:
        part: the class; None if it is not known, and takes anything.
        wrong: what to say about `type`.
    """
    fields: dict[str, Any] = {name: (info.annotation, info) for name, info in section.model_fields.items()}
    if wrong is not None:
        fields["type"] = (Annotated[str, _refuse(wrong)], fields["type"][1].default)
    for number, (name, argument) in enumerate(part.arguments.items() if part is not None else ()):
        kind, default = argument.type, ... if argument.required else _as_type(argument.default, argument.type)
        if kind is Any and isinstance(default, tuple):
            kind = Annotated[Any, AfterValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
        fields[f"argument_{number}"] = (kind, Field(default, alias=name))
    if part is not None:
        for name in part.injected:
            refused = _refuse(f"Weft gives {part.name} its {name}; remove the key")
            fields[f"injected_{name}"] = (Annotated[Any, refused], Field(MISSING, alias=name))
    base = _AnyArguments if part is None or part.accepts_any else _Arguments
    return create_model(section.__name__, __base__=base, **fields)


def _refuse(what: str) -> AfterValidator:
    def refuse(_: Any) -> Any:
        raise PydanticCustomError("told", "{what}", {"what": what})

    return AfterValidator(refuse)


def _as_type(default: Any, kind: Any) -> Any:
    """A default as a value of its own type: 0 for a float is 0.0."""
    if "float" not in str(kind) or isinstance(default, float):
        return default
    try:
        return TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(default)
    except ValidationError:
        return default


def _check_methods(type_: str, source: ClassSource, methods: Mapping[str, tuple[str, ...]]) -> None:
    """Raises UserError if a class cannot be called as Weft calls it, as far as its source tells."""
    found = {name: method_signature(source, name) for name in methods}
    if methods and not any(found.values()):
        wanted = " or ".join(f"{name}({', '.join(given)})" for name, given in methods.items())
        raise UserError(f"{type_!r}: {source.node.name} ({source.place}) has no {wanted}; add the method")
    for name, given in methods.items():
        takes = found[name]
        if takes is None:
            continue
        needed = {key for key, argument in takes.arguments.items() if argument.required}
        if (len(takes.positional) < len(given) and not takes.any_positional) or (
            needed - set(takes.positional[: len(given)])
        ):
            raise UserError(
                f"{type_!r}: Weft calls {name}({', '.join(given)}), and the class ({source.place}) has "
                f"{name}({', '.join(takes.arguments)}); give it these arguments"
            )


def _locate(type_: str, room: str) -> tuple[str, str | None]:
    """Module and class; the class is None for a built-in. A package's plugin stands for its `module:Class`."""
    if ":" not in type_ and type_.replace("-", "_") not in built_ins(room) and type_ in plugins(room):
        plugin = plugins(room)[type_]
        if ":" not in plugin.reference:
            what = f"{type_!r}: the plugin {room}.{type_} of {plugin.package} is {plugin.reference!r}"
            raise UserError(f"{what}, which names no class; its entry point must be module:Class")
        return _locate(plugin.reference, room)
    module, colon, name = type_.partition(":")
    if colon:
        if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            raise UserError(
                f"{type_!r} is no module:Class; write the module as Python imports it, as my_package.module:MyClass"
            )
        return module, name
    known = built_ins(room)
    short = type_.replace("-", "_")
    if short not in known:
        own = "a class of your own is module:Class"
        if room == "model":
            own = f"there are decoder and hf; {own}"
        if not known:
            raise UserError(f"unknown {room} {type_!r}; {own}")
        names = [*known, *plugins(room)]
        near = did_you_mean(short, names)
        what = f"unknown {room} {type_!r}{near} (there are {', '.join(names)}; {own}){unknown_kind_hint(type_)}"
        raise UserError(what)
    return known[short], None


def _hint(module: str) -> str:
    """Near names of modules here."""
    here = [path.stem for path in Path.cwd().glob("*.py")]
    if module not in here and not (Path.cwd() / module.split(".")[0]).exists():
        near = did_you_mean(module, here, cutoff=0.75)
        return near or "; it is looked for in the working directory and on PYTHONPATH"
    return ""


def load_class(chosen: str | Component, room: str) -> type:
    """Import the class that a `type:` means, or a section's `type`. The working directory is on the import path.

    Raises:
        UserError: there is no such module or class; with the place of a section's `type`.
    """
    type_, place = (chosen, None) if isinstance(chosen, str) else (chosen.type, chosen.place)
    module, name = _locate(type_, room)
    if name is None:
        name = find_part(type_, room).name
    elif (here := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        missing = f"no module {error.name!r}"
        raise UserError(f"{type_!r}: {missing}; install it, or put its folder on PYTHONPATH", place) from error
    if found is not None and not isinstance(found, type):
        raise UserError(f"{type_!r} is no class but a {type(found).__name__}; name a class", place)
    if found is None:
        raise UserError(f"{type_!r}: the module {module!r} has no class {name!r}; check the name", place)
    if missing := [need for need in ROOMS[room].needs if not callable(getattr(found, need, None))]:
        what = f"has no method {missing[0]}, which every {room} needs; see docs/own-components.md"
        raise UserError(f"{type_!r}: {name} {what}", place)
    return found


def make_component(section: Component, kind: str, *arguments: Any) -> Any:
    """Makes the component of a section: its class, with the keys of the section as keyword arguments."""
    return load_class(section, kind)(*arguments, **section.arguments)

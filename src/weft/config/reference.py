"""The configuration reference: JSON Schema for editors, and `docs/configuration.md`, both made from the sections.

`python -m weft.config.reference` prints the page, as `weft config schema --markdown` does.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from weft.config.components import Part, built_ins, find_part
from weft.config.draft import ROOM_OF
from weft.config.fields import field_names, listed_sections, section_class
from weft.config.foreign import ForeignModelSection
from weft.config.model import ModelSection
from weft.config.presets import presets
from weft.config.run import RunConfig
from weft.config.section import Component, OwnClass, Spelled
from weft.config.signature import MISSING, Argument
from weft.config.size import in_words, model_size
from weft.config.values import describe, spell

_OWN_CLASS = TypeAdapter(OwnClass).json_schema()["pattern"]

_ITEMS = ("StoreSource", "StageSection")  # of lists, which are replaced whole: no base file has a part of one


# ---- JSON Schema


def json_schema() -> dict[str, Any]:
    """What a run's file may hold, with the built-in parts' arguments. No key is required: a base file may have it."""
    schema = RunConfig.model_json_schema(by_alias=True)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A Weft run"}
    schema["properties"]["extends"] = {
        "description": "file (or files) to inherit from, relative to this one",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    model = schema["properties"]["model"]
    model["anyOf"] = [{"enum": list(presets()), "description": "a preset"}, *model["anyOf"]]
    definitions = schema["$defs"]
    definitions["ModelSection"]["properties"]["preset"]["anyOf"] = [{"enum": list(presets())}, {"type": "null"}]
    for room, name in (
        ("objective", "ObjectiveSection"),
        ("optimizer", "OptimizerSection"),
        ("schedule", "ScheduleSection"),
    ):
        _add_parts(definitions[name], room, required=False)
    _add_parts(definitions["Component"], "tracker", required=True)
    _add_parts(definitions["AttentionPatternSection"], "attention_pattern", required=True)
    for name in ("DatasetSection", "DatasetSource", "CustomModelSection"):
        definitions[name]["properties"]["type"]["pattern"] = _OWN_CLASS
        definitions[name]["required"] = ["type"]
    trackers = definitions["LogSection"]["properties"]["trackers"]["items"]
    trackers["anyOf"] = [
        _type_schema("tracker") if branch.get("type") == "string" else branch for branch in trackers["anyOf"]
    ]
    for branch in definitions["DataSection"]["properties"]["train"]["anyOf"]:
        if branch.get("type") == "array":
            branch["items"]["anyOf"].insert(0, {"type": "string"})
    schema.pop("required", None)
    for name, definition in definitions.items():
        if name not in (
            "Component",
            "AttentionPatternSection",
            "DatasetSection",
            "DatasetSource",
            "CustomModelSection",
            "ForeignModelSection",
            *_ITEMS,
        ):
            definition.pop("required", None)
    return schema


def _type_schema(room: str) -> dict[str, Any]:
    return {"anyOf": [{"enum": list(built_ins(room))}, {"type": "string", "pattern": _OWN_CLASS}]}


def _add_parts(definition: dict[str, Any], room: str, *, required: bool) -> None:
    own = definition["properties"]
    default = own["type"].get("default")
    own["type"] = {**_type_schema(room), "description": f"a built-in {room}, or module:Class of your own"}
    if default is not None:
        own["type"]["default"] = default
    rules = []
    for name in built_ins(room):
        chosen: dict[str, Any] = {"properties": {"type": {"const": name}}}
        if required or name != default:
            chosen["required"] = ["type"]
        part = find_part(name, room)
        arguments = {key: _argument_schema(argument) for key, argument in part.arguments.items()}
        then: dict[str, Any] = {"properties": {**dict.fromkeys(own, True), **arguments}}
        if not part.accepts_any:
            then["additionalProperties"] = False
        rules.append({"if": chosen, "then": then})
    definition["allOf"] = rules


def _argument_schema(argument: Argument) -> dict[str, Any]:
    schema = TypeAdapter(argument.type).json_schema()
    if argument.default is not MISSING:
        schema["default"] = list(argument.default) if isinstance(argument.default, tuple) else argument.default
    return schema


# ---- the page

_INTRODUCTION = """\
# Configuration

<!-- Written by `make docs` from the sections in src/weft/config; change those, not this page. -->

A run is one YAML file. `weft config check run.yaml` finds every mistake in it, in under a second; `weft config show
run.yaml --origin` prints it resolved, with where each value came from; `weft config schema` is its JSON Schema, for
editors. The smallest useful file:

```yaml
model: llama-60m
data: {train: store, validation: heldout}
training: {tokens: 1e9}
```

- **Inherit**: `extends: base.yaml`, or a list of files; paths are relative to the file. Mappings merge, lists
  and values are replaced, the child wins. A section that names another `type` starts anew: the base's arguments were
  another class's.
- **Paths** (stores, tokenizers, runs) are relative to the working directory, not to the file: the same file works
  from wherever the data is. Only `extends` is relative to the file that says it.
- **Override**: `weft train run.yaml optimizer.lr=1e-3 model.num_hidden_layers=8`; values are YAML.
- **Model**: `model: llama-60m`, or `model: {preset: llama-60m, num_hidden_layers: 8}`, or every size by itself, or
  `model: {from: runs/demo}` to begin from another run's weights, or any model of transformers, `model: {type: hf, path:
  folder}`, or a class of your own.
- **A part of your own**: `type: my_package.module:MyClass`. The working directory is on the import path. The class's
  arguments are the keys, with their annotations as types; they are read from its source and checked like all others.
- **Numbers** are YAML 1.2's: `3e-4`, `1_000_000`; `1e9` is a whole number where one is asked for. `null` stands only
  where the table says "or null".
"""


def markdown() -> str:
    """The reference page."""
    parts = [_INTRODUCTION]
    top = []
    for name, info in field_names(RunConfig).items():
        section = section_class(info.annotation)
        if section is None:
            top.append(_row(name, info))
        elif name == "model":
            foreign = _section("model: `type: hf`", ForeignModelSection).replace("##", "###", 1)
            parts.append(_section("model", ModelSection) + "\n" + _presets() + "\n" + foreign)
        else:
            parts.append(_section(name, section))
    keys = "## At the top\n\n" + _table([*top, "| `extends` | text or list of text | | files to inherit from |"])
    return "\n".join([parts[0], keys, *parts[1:]])


def _section(name: str, section: type[BaseModel]) -> str:
    rows = [_row(key, info) for key, info in field_names(section).items()]
    text = f"## {name}\n\n{_prose(section.__doc__)}\n\n{_table(rows)}"
    for key, info in field_names(section).items():
        listed = [part for part in listed_sections(info.annotation) if not issubclass(part, Component)]
        below = section_class(info.annotation)
        if below is not None and not issubclass(below, Component):
            listed.append(below)
        for part in listed:
            inner = [_row(below_key, below_info) for below_key, below_info in field_names(part).items()]
            each = ", each item of a list" if part is not below else ""
            text += f"\n### {name}.{key}{each}\n\n{_prose(part.__doc__)}\n\n{_table(inner)}"
        if below is not None and issubclass(below, Component) and f"{name}.{key}" in ROOM_OF:
            kind = ROOM_OF[f"{name}.{key}"]
            text += f"\n### {name}.{key}\n\n{_prose(below.__doc__)}\n"
            for type_ in built_ins(kind):
                text += "\n" + _part(f"{name}.{key}", type_, find_part(type_, kind)).replace("###", "####", 1)
    room = ROOM_OF.get(name) if issubclass(section, Component) else ("tracker" if name == "log" else None)
    for type_ in built_ins(room) if room else ():
        text += "\n" + _part(name if room != "tracker" else "log.trackers", type_, find_part(type_, room or ""))
    return text


def _part(section: str, type_: str, part: Part) -> str:
    said = _argument_docs(part.doc)
    rows = []
    for name, argument in part.arguments.items():
        default = "" if argument.required or argument.default is MISSING else f"`{spell(argument.default)}`"
        rows.append(f"| `{name}` | {_kind(argument.type)} | {default or 'required'} | {said.get(name, '')} |")
    text = f"### {section}: `type: {type_}`\n\n{_prose(part.doc.partition('Args:')[0])}\n"
    return text + ("\n" + _table(rows) if rows else "")


def _presets() -> str:
    rows = []
    for name, keys in presets().items():
        section = ModelSection(**keys)
        size = model_size(section, 32_000)
        shape = f"{section.num_hidden_layers} layers, width {section.hidden_size}, {section.num_attention_heads} heads"
        if section.num_key_value_heads:
            shape += f", {section.num_key_value_heads} key-value heads"
        vocabulary = f"{section.vocab_size:,}" if section.vocab_size else "32,000"
        rows.append(f"| `{name}` | {shape} | {in_words(size.parameters)} with {vocabulary} tokens |")
    return "### Presets\n\n| preset | shape | parameters |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"


def _row(name: str, info: FieldInfo) -> str:
    section = section_class(info.annotation)
    default = "required" if info.is_required() else ""
    if not info.is_required() and section is None and info.default is not None:
        default = f"`{spell(info.get_default(call_default_factory=True))}`"
    return f"| `{name}` | {_kind(info.annotation, info.metadata)} | {default} | {_prose(info.description or '')} |"


def _table(rows: list[str]) -> str:
    return "| key | value | default | |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"


def _kind(kind: Any, bounds: Iterable[Any] = ()) -> str:
    """A type with its bounds, in words."""
    if kind == OwnClass or any(isinstance(part, Spelled) for part in get_args(kind)):
        return describe(kind)
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *more = get_args(kind)
        return _kind(inner, [*bounds, *more])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kind(branch, bounds) for branch in get_args(kind)))
    if bounds and kind is not type(None):
        words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than", "multiple_of": "multiple of"}
        said = [f"{words[key]} {getattr(bound, key)}" for bound in bounds for key in words if hasattr(bound, key)]
        return _kind(kind) + (f" {', '.join(said)}" if said else "")
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if origin is list and get_args(kind):
        return f"list of: {_kind(get_args(kind)[0])}"
    if origin is tuple:
        return f"[{'; '.join(_kind(part) for part in get_args(kind) if part is not ...)}]"
    if isinstance(kind, type) and issubclass(kind, BaseModel) and not issubclass(kind, Component):
        return f"`{{{', '.join(f'{key}: ...' for key in field_names(kind))}}}`"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "`{type: ..., ...}`"
    if origin is dict and get_args(kind):
        return f"mapping of names to: {_kind(get_args(kind)[1])}"
    return describe(kind)


def _prose(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _argument_docs(doc: str) -> dict[str, str]:
    """`Args:` of a docstring: name -> text."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in doc.partition("Args:\n")[2].splitlines():
        match = re.fullmatch(r"    (\w+(?:, \w+)*): (.*)", line)
        if line and not line.startswith("    "):
            break
        if match:
            names = match[1].split(", ")
            found.update(dict.fromkeys(names, match[2]))
        else:
            found.update({name: f"{found[name]} {line.strip()}".strip() for name in names})
    return {name: _prose(text) for name, text in found.items()}


if __name__ == "__main__":
    print(markdown(), end="")

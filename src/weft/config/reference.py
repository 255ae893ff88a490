"""The configuration reference: JSON Schema for editors, and `docs/configuration.md`, both made from the sections.

`python -m weft.config.reference` prints the page, as `weft config schema --markdown` does.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from weft.config.components import Part, built_ins, find_part
from weft.config.error_messages import describe, spell
from weft.config.fields import field_names, listed_sections, section_class, sections_in
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.config.section import Component, Own, Spelled
from weft.config.signature import MISSING, Argument
from weft.config.transformers_model import TransformersModelSection
from weft.families import presets
from weft.formatting import amount

_ITEMS = ("StoreSource", "StageSection")  # of lists, which are replaced whole: no base file has a part of one


# ---- JSON Schema


def json_schema() -> dict[str, Any]:
    """What a run's file may hold, with the built-in parts' arguments. No key is required: a base file may have it."""
    schema = RunConfig.model_json_schema(by_alias=True)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A Weft run"}
    schema["description"] = "In values ${NAME} is a variable of the environment, and a leading ~/ the home folder."
    schema["properties"]["extends"] = {
        "description": "file (or files) to inherit from, relative to this one",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    model = schema["properties"]["model"]
    model["anyOf"] = [{"enum": list(presets()), "description": "a preset"}, *model.pop("oneOf")]
    definitions = schema["$defs"]
    definitions["ModelSection"]["properties"]["preset"]["anyOf"] = [{"enum": list(presets())}, {"type": "null"}]
    components = {section.__name__: section for section in _components(RunConfig)}
    for name, section in components.items():
        _add_parts(definitions[name], section.kind)
    _take_texts(schema, components)
    schema.pop("required", None)
    for name, definition in definitions.items():
        if name not in (*components, "TransformersModelSection", *_ITEMS):
            definition.pop("required", None)
    return schema


def _components(section: type[BaseModel]) -> Iterator[type[Component]]:
    """All kinds of component that a section's fields, and the sections below, may be."""
    for info in field_names(section).values():
        for below in sections_in(info.annotation):
            if issubclass(below, Component):
                yield below
            else:
                yield from _components(below)


def _take_texts(node: Any, components: dict[str, type[Component]]) -> None:
    """A text stands for an item of a list of sections: its required key alone."""
    if isinstance(node, dict) and isinstance(node.get("items"), dict):
        branches = node["items"].get("anyOf") or node["items"].get("oneOf") or [node["items"]]
        names = [branch["$ref"].rpartition("/")[2] for branch in branches if "$ref" in branch]
        found = next((components[name] for name in names if name in components), None)
        if found is not None:
            first = _type_schema(found.kind) if names[0] in components else {"type": "string"}
            node["items"] = {"anyOf": [first, *(branch for branch in branches if "$ref" in branch)]}
    for below in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _take_texts(below, components)


def _type_schema(kind: str) -> dict[str, Any]:
    own, names = {"type": "string", "pattern": Own.pattern}, list(built_ins(kind))
    return {"anyOf": [{"enum": names}, own]} if names else own


def _add_parts(definition: dict[str, Any], kind: str) -> None:
    own = definition["properties"]
    default, required = own["type"].get("default"), "type" in definition.get("required", [])
    own["type"] = {**_type_schema(kind), "description": f"a built-in {kind}, or module:Class of your own"}
    if default is not None:
        own["type"]["default"] = default
    rules = []
    for name in built_ins(kind):
        chosen: dict[str, Any] = {"properties": {"type": {"const": name}}}
        if required or name != default:
            chosen["required"] = ["type"]
        part = find_part(name, kind)
        arguments = {key: _argument_schema(argument) for key, argument in part.arguments.items()}
        then: dict[str, Any] = {"properties": {**dict.fromkeys(own, True), **arguments}}
        if not part.accepts_any:
            then["additionalProperties"] = False
        rules.append({"if": chosen, "then": then})
    if rules:
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
- **Environment**: `${NAME}` in a value is that variable, a leading `~/` the home folder; both are expanded once.
  `$${NAME}` is the text `${NAME}`. A variable that is not set is a mistake.
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
            for part in sections_in(info.annotation):
                if issubclass(part, Component):
                    parts.append(f"## {name}\n\n{_prose(part.__doc__)}\n" + _parts(name, part.kind))
        elif name == "model":
            foreign = _section("model: `type: hf`", TransformersModelSection).replace("##", "###", 1)
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
        for part in sections_in(info.annotation)[:1]:
            if issubclass(part, Component):
                text += f"\n### {name}.{key}\n\n{_prose(part.__doc__)}\n" + _parts(f"{name}.{key}", part.kind)
    return text + (_parts(name, section.kind) if issubclass(section, Component) else "")


def _parts(key: str, kind: str) -> str:
    """The built-in components of a kind."""
    level = "####" if "." in key else "###"
    return "".join(
        "\n" + _part(key, type_, find_part(type_, kind)).replace("###", level, 1) for type_ in built_ins(kind)
    )


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
        size = section.size(32_000)
        shape = f"{section.num_hidden_layers} layers, width {section.hidden_size}, {section.num_attention_heads} heads"
        if section.num_key_value_heads:
            shape += f", {section.num_key_value_heads} key-value heads"
        vocabulary = f"{section.vocab_size:,}" if section.vocab_size else "32,000"
        rows.append(f"| `{name}` | {shape} | {amount(size.parameters)} with {vocabulary} tokens |")
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
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *more = get_args(kind)
        return _kind(inner, [*bounds, *more])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kind(branch, bounds) for branch in get_args(kind)))
    if spelled := [bound for bound in bounds if isinstance(bound, Spelled)]:
        return spelled[0].words
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

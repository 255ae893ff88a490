"""Generates the configuration reference page, `docs/configuration.md`, and a JSON Schema from the sections.

`python -m weft.config.reference` prints the page, as `weft config schema --markdown` does.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from weft.config.components import built_ins, find_component
from weft.config.error_messages import describe, spell
from weft.config.fields import (
    branches,
    descriptions,
    field_names,
    listed_sections,
    required_key,
    section_class,
    sections_in,
)
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.config.section import Component, CustomClass, TextPattern
from weft.config.signature import MISSING, Argument
from weft.families import presets
from weft.formatting import amount

# Sections whose required keys the schema requires too: they are items of lists, or chosen by `type`.
_COMPLETE = ("StoreSource", "StageSection", "TransformersModelSection")
_EXTENDS = (
    "File, or list of files, whose keys this file inherits. Paths are relative to this file. Later files of the list "
    "take precedence."
)
_EXAMPLE = Path(__file__).with_name("example.yaml")


def all_sections(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yields a section, and all sections and components below this section."""
    yield section
    for info in field_names(section).values():
        for below in sections_in(info.annotation):
            yield from all_sections(below)


# ---- JSON Schema


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a run's YAML file, with the arguments of built-in components.

    The schema requires no top-level key, because a file can inherit keys.
    """
    schema = RunConfig.model_json_schema(by_alias=True)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A Weft run"}
    schema["description"] = "In values, ${NAME} is an environment variable, and a leading ~/ is the home folder."
    definitions = schema["$defs"]
    sections = {section.__name__: section for section in all_sections(RunConfig)}
    for name, section in sections.items():
        properties = definitions.get(name, schema)["properties"]
        for key, text in descriptions(section).items():
            properties[key]["description"] = text
    schema["properties"]["extends"] = {
        "description": _EXTENDS,
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    model = schema["properties"]["model"]
    model["anyOf"] = [{"enum": list(presets()), "description": "a preset"}, *model.pop("oneOf")]
    definitions["ModelSection"]["properties"]["preset"]["anyOf"] = [{"enum": list(presets())}, {"type": "null"}]
    components = {name: section for name, section in sections.items() if issubclass(section, Component)}
    for name, section in components.items():
        _add_built_ins(definitions[name], section.kind)
    _allow_texts(schema, components)
    for name, definition in (("", schema), *definitions.items()):
        if name not in (*components, *_COMPLETE):
            definition.pop("required", None)
    return schema


def _allow_texts(node: Any, components: dict[str, type[Component]]) -> None:
    """Allows, in the JSON Schema `node`, a string as short form of each section in a list (see `_short_forms`).

    `components`: name of a definition in the schema -> the component section that it describes.
    """
    if isinstance(node, dict) and isinstance(node.get("items"), dict):
        branches = node["items"].get("anyOf") or node["items"].get("oneOf") or [node["items"]]
        names = [branch["$ref"].rpartition("/")[2] for branch in branches if "$ref" in branch]
        found = next((components[name] for name in names if name in components), None)
        if found is not None:
            first = _type_schema(found.kind) if names[0] in components else {"type": "string"}
            node["items"] = {"anyOf": [first, *(branch for branch in branches if "$ref" in branch)]}
    for below in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _allow_texts(below, components)


def _type_schema(kind: str) -> dict[str, Any]:
    custom, names = {"type": "string", "pattern": CustomClass.pattern}, list(built_ins(kind))
    return {"anyOf": [{"enum": names}, custom]} if names else custom


def _add_built_ins(definition: dict[str, Any], kind: str) -> None:
    keys = definition["properties"]
    default, required = keys["type"].get("default"), "type" in definition.get("required", [])
    described = f"Name of a built-in {kind}, or a custom class module:Class."
    keys["type"] = {**_type_schema(kind), "description": described}
    if default is not None:
        keys["type"]["default"] = default
    rules = []
    for name in built_ins(kind):
        chosen: dict[str, Any] = {"properties": {"type": {"const": name}}}
        if required or name != default:
            chosen["required"] = ["type"]
        found = find_component(name, kind)
        arguments = {key: _argument_schema(argument) for key, argument in found.arguments.items()}
        then: dict[str, Any] = {"properties": {**dict.fromkeys(keys, True), **arguments}}
        if not found.accepts_any:
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

<!-- Generated by `make docs` from the sections in src/weft/config; edit those, not this page. -->

A run is one YAML file. `weft config check run.yaml` reports all errors in the file in less than a second. `weft config
show run.yaml --origin` prints the resolved file with the origin of each value. `weft config schema` prints a JSON
Schema for editors. The smallest useful file:

```yaml
model: llama-60m
data: {train: stores/web, validation: stores/web-heldout}
training: {tokens: 1e9}
```

- **Inheritance.** `extends: base.yaml`, or a list of files. Their paths are relative to the inheriting file. Mappings
  are merged, lists and values are replaced. Later files of the list take precedence over earlier files, and the
  inheriting file takes precedence over all files of the list. A section that sets another `type` than the
  inherited section replaces it completely, because the inherited keys are the arguments of another class.
- **Paths** of stores, tokenizers and runs are relative to the working directory.
- **Environment variables.** `${NAME}` in a value is replaced by the environment variable, and a leading `~/` by the
  home folder. The result is not expanded again. Write `$${NAME}` for the text `${NAME}`. A variable that is not set is
  an error.
- **Overrides.** `weft train run.yaml optimizer.lr=1e-3 model.num_hidden_layers=8`; each value is parsed as YAML.
- **Models.** `model: llama-60m` is short for `model: {preset: llama-60m}`. Without a preset, set the sizes of the
  model. `model: {from: runs/demo}` starts from the weights of another run, `model: {type: hf, path: folder}` trains any
  causal language model of Transformers, and `model: {type: module:Class}` trains a custom model.
- **Custom components.** `type: my_package.module:MyClass` selects a custom class. Weft adds the working directory to
  the import path. The arguments of the class are keys of the section. Weft reads the types and defaults of the
  arguments from the source of the class, and checks the values like those of other keys.
- **Numbers** follow YAML 1.2: `3e-4`, `1_000_000`. `1e9` is accepted as an integer. `null` is accepted only where the
  column "value" says so. A default of `null` means that the key is not set; the description then names the
  effective default.
"""
_PRESETS = """\
The number of parameters includes the embedding and the output head. A preset without a vocabulary size, such as
`llama-60m`, takes the size from the tokenizer; the table assumes a vocabulary of 32,000. With a vocabulary of 8,192,
`llama-14m` has 13.8M parameters."""


def examples() -> dict[str, str]:
    """Returns an example for each top-level key. All examples together are one valid file."""
    blocks = re.split(r"^(?=\w)", _EXAMPLE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {block.partition(":")[0]: block for block in blocks if block}


def markdown() -> str:
    """Returns the text of docs/configuration.md."""
    fields, described = field_names(RunConfig), descriptions(RunConfig)
    plain = {name: info for name, info in fields.items() if not sections_in(info.annotation)}
    rows = [_row(name, info, described[name]) for name, info in plain.items()]
    top = _table([*rows, f"| `extends` | string or list of string | | {_EXTENDS} |"])
    parts = [_INTRODUCTION, f"## Top-level keys\n\n```yaml\n{examples()['tokenizer']}```\n\n{top}"]
    for name, info in fields.items():
        if name not in plain:
            parts += _chapters(name, info, 2)
            if name == "model":
                parts.append(_presets())
    return "\n".join(parts)


def _chapters(key: str, info: FieldInfo, level: int) -> Iterator[str]:
    """Yields a chapter for each section class that a field allows as its value.

    Args:
        key: dotted key of the field.
        info: the field.
        level: heading level of the chapter.
    """
    kinds: dict[str, type[BaseModel]] = {}
    for section in sections_in(info.annotation):
        kinds.setdefault(section.kind if issubclass(section, Component) else section.__name__, section)
    for number, section in enumerate(kinds.values()):
        title = key
        if number and "type" in field_names(section):
            title += f": `type: {'module:Class' if issubclass(section, Component) else 'hf'}`"
        elif level > 2 and issubclass(section, Component) and not built_ins(section.kind):
            title += ": `type: module:Class`"
        elif section in listed_sections(info.annotation) and not issubclass(section, Component):
            title += ", each item of the list"
        text = f"{'#' * level} {title}\n\n{_prose(section.__doc__)}\n"
        if level == 2 and number == 0:
            text += f"\n```yaml\n{examples()[key]}```\n"
        fields, described = field_names(section), descriptions(section)
        rows = [_row(name, field, described.get(name, "")) for name, field in fields.items()]
        if number == 0 and len(kinds) > 1 and get_origin(getattr(fields.get("type"), "annotation", None)) is Literal:
            rows[list(fields).index("type")] = _type_row(list(kinds.values()), described["type"])
        yield text + (f"\n{_table(rows)}" if rows and (number == 0 or not issubclass(section, Component)) else "")
        for name, field in fields.items():
            yield from _chapters(f"{key}.{name}", field, level + 1)
        if not issubclass(section, Component):
            continue
        for type_ in built_ins(section.kind):
            yield f"{'#' * (level + 1)} {key}: `type: {type_}`\n\n{_built_in(type_, section.kind)}"


def _built_in(type_: str, kind: str) -> str:
    found = find_component(type_, kind)
    described, rows = _argument_docs(found.doc), []
    for name, argument in found.arguments.items():
        default = "" if argument.required or argument.default is MISSING else f"`{spell(argument.default)}`"
        text = described.get(name, "")
        sentence = text[:1].upper() + text[1:]
        rows.append(f"| `{name}` | {_kind(argument.type)} | {default or 'required'} | {sentence} |")
    return f"{_prose(found.doc.partition('Args:')[0])}\n" + ("\n" + _table(rows) if rows else "")


def _presets() -> str:
    rows = []
    for name, keys in presets().items():
        section = ModelSection(**keys)
        size = section.size(32_000)
        shape = f"{section.num_hidden_layers} layers, hidden size {section.hidden_size}, "
        shape += f"{section.num_attention_heads} heads"
        if section.num_key_value_heads:
            shape += f", {section.num_key_value_heads} key/value heads"
        vocabulary = f"{section.vocab_size:,}" if section.vocab_size else "32,000"
        rows.append(f"| `{name}` | {shape} | {vocabulary} | {amount(size.parameters)} |")
    head = "| preset | shape | vocabulary | parameters |\n| --- | --- | --- | --- |\n"
    return f"### Presets\n\n{_PRESETS}\n\n{head}" + "\n".join(rows) + "\n"


def _row(name: str, info: FieldInfo, description: str) -> str:
    default = "required" if info.is_required() else ""
    if not info.is_required() and (section_class(info.annotation) is None or info.default is None):
        default = f"`{spell(info.get_default(call_default_factory=True))}`"
    return f"| `{name}` | {_kind(info.annotation, info.metadata)} | {default} | {_prose(description)} |"


def _type_row(sections: list[type[BaseModel]], description: str) -> str:
    """Returns the table row that describes the key `type` of a section that can be of several classes."""
    fields = [field_names(section)["type"] for section in sections]
    values = [_kind(field.annotation).replace("string", "module:Class") for field in fields]
    return f"| `type` | {' or '.join(values)} | `{spell(fields[0].default)}` | {_prose(description)} |"


def _table(rows: list[str]) -> str:
    return "| key | value | default | description |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"


def _kind(kind: Any, bounds: Iterable[Any] = ()) -> str:
    """Describes a type and its bounds, for the column "value" of a table."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _kind(arguments[0], [*bounds, *arguments[1:]])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kind(branch, bounds) for branch in arguments))
    if patterns := [bound for bound in bounds if isinstance(bound, TextPattern)]:
        return patterns[0].words.removeprefix("a ")
    if bounds and kind is not type(None):
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "multiple of"}
        pairs = [(bound, name) for bound in bounds for name in signs if hasattr(bound, name)]
        limits = " and ".join(f"{signs[name]} {_number(getattr(bound, name))}" for bound, name in pairs)
        text = f"{_kind(kind)} {limits}".strip()
        # 0 is within the bounds of a mesh axis, but `mesh_shape` refuses it.
        return f"{text.replace('>= -1', '>= 1')} or -1" if ">= -1" in text else text
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is list and arguments:
        return f"list of {_one(' or '.join([*_short_forms(arguments[0]), _kind(arguments[0])]))}"
    if origin is tuple:
        return f"[{', '.join(_kind(part) for part in arguments if part is not ...)}]"
    if origin is dict and arguments:
        return f"mapping of names to {_one(_kind(arguments[1]))}"
    if isinstance(kind, type) and issubclass(kind, Component):
        return "`{type: ..., ...}`"
    return "string" if kind is str else describe(kind).removeprefix("an ").removeprefix("a ")


def _short_forms(item: Any) -> list[str]:
    """Returns the types of strings that can replace a list item of type `item`: ["string"], ["folder"] or [].

    If the item is a section, such a string is the value of the section's required key.
    """
    sections = [kind for kind in branches(item) if isinstance(kind, type) and issubclass(kind, BaseModel)]
    key = required_key(sections[0]) if sections and str not in branches(item) else None
    kind = _kind(field_names(sections[0])[key].annotation, field_names(sections[0])[key].metadata) if key else ""
    return [kind] if kind in ("string", "folder") else []


def _number(bound: float) -> str:
    """Returns a bound without an exponent: `1000000`, `0.5`."""
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"


def _one(kind: str) -> str:
    """Puts the description of a type in parentheses if it lists alternatives: `(folder or string)`."""
    return f"({kind})" if " or " in kind or ", " in kind.partition("{")[0] else kind


def _prose(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _argument_docs(doc: str) -> dict[str, str]:
    """Returns the descriptions in the `Args:` of a docstring: name -> text."""
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

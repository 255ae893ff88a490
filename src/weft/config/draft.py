"""A run's tree on its way to a `RunConfig`: every section checked against its schema, all problems gathered."""

from __future__ import annotations

import re
import types
from typing import Any, TypeVar, Union, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from weft.config.components import Part, find_part
from weft.config.errors import Problem, UserError
from weft.config.fields import field_names, known_keys, listed_sections, plain_types, required_key, section_class
from weft.config.foreign import ForeignModelSection
from weft.config.model import CustomModelSection, ModelSection
from weft.config.section import Component
from weft.config.signature import MISSING
from weft.config.suggest import meant_key, nearest, unknown_key
from weft.config.tree import Node
from weft.config.values import INVALID, check_value, show, spell
from weft.config.whole import RunSections

# Which parts a section chooses from.
ROOM_OF = {
    "objective": "objective",
    "optimizer": "optimizer",
    "schedule": "schedule",
    "model": "model",
    "model.attention_pattern": "attention_pattern",
    "data.train": "dataset",
    "data.validation": "dataset",
    "data.train[]": "dataset",
    "log.trackers": "tracker",
}
# Keys whose text is a path.
PATHS = (
    "tokenizer",
    "data.train",
    "data.train[].store",
    "data.validation",
    "model.from",
    "model.path",
    "run.directory",
)
# What a key that must be there is for.
_SIZE = "a size of the decoder, or name a preset, as preset: llama-60m"
REQUIRED = {
    "model": "what to train, as model: llama-60m",
    "data.train": "the token store to learn from (`weft data pack` makes one)",
    **dict.fromkeys(("model.hidden_size", "model.num_hidden_layers", "model.num_attention_heads"), _SIZE),
}

_Component = TypeVar("_Component", bound=Component)


class Draft:
    """What is known of a run so far.

    Attributes:
        tree: the merged file.
        values: dotted key -> checked value, defaults filled in; a key with a problem is not in it.
        origins: dotted key -> where the value came from.
        problems: all found.
        meant: keys that misspelt ones were meant to be: they are not missed, and have no default.
        model_known: False if a preset or checkpoint could not be read: so with all keys that it would have.
    """

    def __init__(self, tree: Node, problems: list[Problem]):
        self.tree, self.problems = tree, problems
        self.meant: set[str] = set()
        self.model_known = True
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}

    def get(self, key: str) -> Any:
        """A checked value; None if it has a problem."""
        return self.values.get(key)

    def node(self, key: str) -> Node:
        """The node of a key, or the nearest above it that is written down."""
        node = self.tree
        for part in key.split("."):
            below = node.get(part)
            if below is None:
                break
            node = below
        return node

    def problem(self, key: str, what: str, *also: str) -> None:
        """Note a mistake at the first of the keys that is in a file, not in a preset; a section's keys first."""
        own = self.tree.get(*key.split("."))
        for place in (*also, key) if own is not None and own.is_mapping else (key, *also):
            node = self.tree.get(*place.split("."))
            if node is not None and node.origin is None:
                self.problems.append(node.problem(key, what))
                return
        self.problems.append(self.node(key).problem(key, what))

    @property
    def whole(self) -> bool:
        """Whether all that the file inherits was read."""
        return "extends" not in self.meant

    def fill(self, key: str, value: Any, origin: str) -> None:
        """Set a value that follows from others."""
        self.values[key], self.origins[key] = value, origin

    # ---- sections

    def check(self) -> None:
        """Check the whole tree."""
        self.check_section(self.tree, RunSections, "")

    def check_section(self, node: Node, section: type[BaseModel], key: str) -> None:
        """One section's keys: known, of the right type, none missing."""
        fields = field_names(section)
        unknown = set(node.value) - set(fields)
        for name in node.value:
            if name in unknown:
                self.unknown(node.value[name], key, name, list(fields))
        for name, info in fields.items():
            inner = f"{key}.{name}" if key else name
            below = node.get(name)
            if below is None:
                self.without(inner, info)
            else:
                self.origins[inner] = below.place
                self.check_field(below, info, inner)

    def without(self, key: str, info: FieldInfo) -> None:
        """A key that is not there: its default, or a problem if it must be.

        Where it may be there all the same (misspelt, in a base or preset that could not be read), neither.
        """
        section = section_class(info.annotation)
        if key in self.meant or (key.startswith("model.") and not self.model_known):
            return
        if info.is_required() and (not self.whole or any(meant.startswith(f"{key}.") for meant in self.meant)):
            if section is not None and key not in ("model", "data.train"):
                self.check_section(Node({}, self.node(key).file, self.node(key).line), section, key)
            return
        if info.is_required() and section is not None and key not in ("model", "data.train"):
            self.check_section(Node({}, self.node(key).file, self.node(key).line), section, key)
        elif info.is_required():
            self.problem(key, f"required: {REQUIRED.get(key) or info.description or 'give it a value'}; add it")
        elif section is not None and isinstance(info.default, BaseModel):
            empty = Node({}, self.node(key).file, self.node(key).line)
            if issubclass(section, Component):
                self.check_component(empty, section, ROOM_OF[key], key)
            else:
                self.check_section(empty, section, key)
        else:
            self.fill(key, info.get_default(call_default_factory=True), "default")

    def check_field(self, node: Node, info: FieldInfo, key: str) -> None:
        """One key's value."""
        if key == "model":
            return self.check_model(node)
        if key == "log.trackers":
            return self.check_trackers(node, key)
        section = section_class(info.annotation)
        if section is not None and node.is_mapping:
            if issubclass(section, Component):
                return self.check_component(node, section, ROOM_OF[key], key)
            return self.check_section(node, section, key)
        listed = listed_sections(info.annotation)
        if listed and isinstance(node.value, list):
            return self.check_list(node, listed, key)
        others = [kind for kind in plain_types(info.annotation) if not listed or get_origin(kind) is not list]
        if listed and others == [types.NoneType] and node.value is not None:
            self.problems.append(node.problem(key, f"must be a list of mappings, not {show(node)}"))
            return None
        if section is not None and (not others or (others == [types.NoneType] and node.value is not None)):
            what = "null has no meaning here; remove the key to get the defaults"
            if node.value is not None:
                example = f"{{type: {node.value}}}" if issubclass(section, Component) else "{key: value, ...}"
                what = f"must be a mapping, as {key}: {example}, not {show(node)}"
            self.problems.append(node.problem(key, what))
            return None
        kind = Union[tuple(others)] if others else Any  # noqa: UP007 - built at run time
        default = INVALID if info.is_required() or info.default is None else info.get_default(call_default_factory=True)
        value = check_value(node, kind, key, self.problems, constraints=info.metadata, default=default)
        if isinstance(value, str) and not value.strip() and re.sub(r"\[\d+\]", "[]", key) in PATHS:
            self.problems.append(node.problem(key, "empty; name a folder"))
        elif value is not INVALID:
            self.values[key] = value
        return None

    def check_model(self, node: Node) -> None:
        """The decoder's section, a transformers model's or a class of one's own (presets are merged in before)."""
        chosen = node.get("type")
        if not node.is_mapping:
            self.problems.append(node.problem("model", f"must be a preset's name or a mapping, not {show(node)}"))
        elif chosen is not None and chosen.value == "hf":
            self.check_section(node, ForeignModelSection, "model")
        elif chosen is not None and isinstance(chosen.value, str) and chosen.value != "decoder":
            self.check_component(node, CustomModelSection, "model", "model")
        else:
            self.check_section(node, ModelSection, "model")

    def check_list(self, node: Node, sections: list[type[BaseModel]], key: str) -> None:
        """A list of mappings: each of the kind whose required key it has. A text stands for that key alone."""
        values: list[Any] = []
        before = len(self.problems)
        if not node.value:
            self.problems.append(node.problem(key, "the list is empty; add an item, or remove the key"))
        for number, item in enumerate(node.value):
            inner = f"{key}[{number}]"
            shorthand = required_key(sections[0])
            if isinstance(item.value, str) and shorthand is not None:
                item = Node({shorthand: item}, item.file, item.line)
            if not item.is_mapping:
                self.problems.append(item.problem(inner, f"must be a mapping, not {show(item)}"))
                continue
            section = next((s for s in reversed(sections) if (required_key(s) or "") in item.value), sections[0])
            if issubclass(section, Component):
                self.check_component(item, section, ROOM_OF[f"{key}[]"], inner)
                if inner in self.values:
                    values.append(self.component(section, inner))
                continue
            found = len(self.problems)
            self.check_section(item, section, inner)
            if len(self.problems) == found:
                values.append(section(**{name: self.values[f"{inner}.{name}"] for name in field_names(section)}))
        if len(self.problems) == before:
            self.values[key] = values

    def check_trackers(self, node: Node, key: str) -> None:
        """A list of names, or of mappings with a `type`."""
        if not isinstance(node.value, list):
            remedy = f"; write [{node.value}]" if isinstance(node.value, str) else ""
            self.problems.append(node.problem(key, f"must be a list, not {show(node)}{remedy}"))
            return
        values: list[Any] = []
        before = len(self.problems)
        for number, item in enumerate(node.value):
            inner = f"{key}[{number}]"
            if isinstance(item.value, str) and ":" in item.value:
                item = Node({"type": item}, item.file, item.line)
            if isinstance(item.value, str):
                self.part(item, item.value, "tracker", inner)
                values.append(item.value)
            elif item.is_mapping:
                self.check_component(item, Component, "tracker", inner)
                if inner in self.values:
                    values.append(self.component(Component, inner))
            else:
                self.problems.append(item.problem(inner, f"must be a name or {{type: ...}}, not {show(item)}"))
        if len(self.problems) == before:
            self.values[key] = values

    # ---- components

    def component(self, section: type[_Component], key: str) -> _Component:
        """The checked section of a `type:`, which knows where that was written."""
        made = section(**self.values[key])
        if self.origins.get(f"{key}.type", "default") != "default":
            made._place = f"{self.origins[f'{key}.type']}: {key}.type"
        return made

    def part(self, node: Node, type_: str, room: str, key: str) -> Part | None:
        """The part that a `type:` means, or None and a problem."""
        try:
            return find_part(type_, room)
        except UserError as error:
            self.problems.append(node.problem(key, error.what))
            return None

    def check_component(self, node: Node, section: type[BaseModel], room: str, key: str) -> None:
        """A `type:` and its arguments, by the class's signature; completed with its defaults.

        `values[key]` becomes the whole mapping; each of its keys is in `values` too.
        """
        fields = field_names(section)
        found: dict[str, Any] = {}
        before = len(self.problems)
        for name, info in fields.items():
            inner = f"{key}.{name}"
            if name in node.value:
                self.origins[inner] = node.value[name].place
                self.check_field(node.value[name], info, inner)
            else:
                self.without(inner, info)
            if inner in self.values:
                found[name] = self.values[inner]
        chosen = self.get(f"{key}.type")
        part = None
        if chosen is not None:
            part = self.part(node.get("type") or node, chosen, room, f"{key}.type")
        if part is not None:
            found |= self.arguments(node, part, fields, key)
        if len(self.problems) == before:
            self.values[key] = found

    def arguments(self, node: Node, part: Part, fields: dict[str, FieldInfo], key: str) -> dict[str, Any]:
        """The keys beside a section's own, checked; defaults for those that are not there."""
        found: dict[str, Any] = {}
        typo = next((name for name in node.value if nearest(name, ["type"], 0.75)), None)
        if "type" not in node.value and typo is not None and typo not in part.arguments and typo not in fields:
            self.unknown(node.value[typo], key, typo, list(fields))
            return {}  # the other keys are not this part's
        for name, below in node.value.items():
            inner = f"{key}.{name}"
            if name in fields:
                continue
            self.origins[inner] = below.place
            argument = part.arguments.get(name)
            if name in part.injected:
                self.problems.append(below.problem(inner, f"Weft gives {part.name} its {name}; remove the key"))
            elif argument is not None:
                default = INVALID if argument.required or argument.default is MISSING else argument.default
                value = check_value(below, argument.type, inner, self.problems, default=default)
                if value is INVALID:
                    continue
                found[name] = tuple(value) if isinstance(default, tuple) and isinstance(value, list) else value
            elif part.accepts_any:
                found[name] = below.plain()
            else:
                self.unknown(below, key, name, [*part.arguments, *fields])
        for name, argument in part.arguments.items():
            inner = f"{key}.{name}"
            if name in node.value or name in fields or inner in self.meant:
                continue
            if argument.required:
                self.problems.append(node.problem(inner, f"required by {part.name}; add it"))
            elif argument.default is not MISSING:
                found[name] = as_type(argument.default, argument.type)
                self.origins[inner] = "default"
        for name, value in found.items():
            self.values[f"{key}.{name}"] = value
        return found

    def unknown(self, node: Node, section: str, key: str, known: list[str]) -> None:
        """A key that does not exist."""
        everywhere = {*known_keys(), "extends"}
        for home in ("optimizer", "schedule"):
            chosen = self.tree.get(home, "type")
            default = RunSections.model_fields[home].default.type
            try:
                part = find_part(str(chosen.value) if chosen is not None else default, home)
            except UserError:
                part = find_part(default, home)
            everywhere |= {f"{home}.{name}" for name in part.arguments}
        known = known if section else [*known, "extends"]
        meant, note = meant_key(section, key, known, everywhere)
        if meant is not None:
            self.meant.add(f"{section}.{meant}" if section and meant in known else meant)
            self.model_known &= self.meant.isdisjoint(("model.preset", "model.from", "model.type"))
        self.problems.append(node.problem(f"{section}.{key}" if section else key, unknown_key(meant, note, known)))


def as_type(default: Any, kind: Any) -> Any:
    """A default as a value of its own type: 0 for a float is 0.0."""
    value = INVALID if kind is Any else check_value(_node_of(default), kind, "", [])
    return default if value is INVALID else value


def _node_of(value: Any) -> Node:
    if isinstance(value, (list, tuple)):
        return Node([_node_of(item) for item in value])
    if isinstance(value, dict):
        return Node({name: _node_of(item) for name, item in value.items()})
    return Node(value, text=None if value is None else spell(value))


def node_of(value: Any, like: Node, origin: str) -> Node:
    """Plain data as a tree whose mistakes are told at `like`'s place."""
    if isinstance(value, dict):
        return Node(
            {name: node_of(item, like, origin) for name, item in value.items()}, like.file, like.line, None, origin
        )
    if isinstance(value, list):
        return Node([node_of(item, like, origin) for item in value], like.file, like.line, None, origin)
    return Node(value, like.file, like.line, spell(value), origin)

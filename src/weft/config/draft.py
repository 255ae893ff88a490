"""Defines `Draft`, which holds the YAML tree of a run while pydantic validates the tree and the rules check it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ModelWrapValidatorHandler, ValidationError
from pydantic_core import ErrorDetails

from weft.config.components import ComponentClass, arguments_model, find_component
from weft.config.error_messages import FieldError, convert, error_message, resolve_unions
from weft.config.fields import (
    descriptions,
    field_names,
    keeps_text,
    known_keys,
    listed_sections,
    replace_at,
    required_key,
    section_class,
    values_by_key,
)
from weft.config.inherit import TYPES
from weft.config.section import Component, Section
from weft.config.signature import MISSING
from weft.config.suggest import RENAMED, meant_key, unknown_key
from weft.config.tree import Node
from weft.errors import Problem, UserError

# Description of required keys in the message for a missing key.
_SIZE = "a size of the decoder, or a preset, such as preset: llama-60m"
REQUIRED = {
    "model": "the model to train, such as model: llama-60m",
    "data.train.type": "module:Class of a custom dataset (a mixture is a list of {store: PATH, weight: ...} instead)",
    **dict.fromkeys(("model.hidden_size", "model.num_hidden_layers", "model.num_attention_heads"), _SIZE),
}


class Draft:
    """The tree, the values and the problems of a run's file. Sections get the draft as pydantic's validation context.

    Args:
        tree: the merged file.
        problems: the problems found so far, to which this class adds more.
        kind: the class of the configuration: `RunConfig`.
        model_known: whether the preset or checkpoint of the model was read. If not, missing keys of `model` are not
            reported.
        ranks: the world size; None if it is not known.

    Attributes:
        values: validated values and defaults by dotted key, without keys that have a problem. The value of a component
            is a mapping. Any other section has an entry for each of its keys, but no entry for the section itself.
        origins: origin of each value by dotted key, such as `run.yaml:4` or `default`.
        meant: for each misspelled key of the file, the dotted key that was most likely meant. The keys in `meant` are
            not reported as missing, and get no default.
        config: the validated configuration; None if a value is not valid.
    """

    def __init__(
        self,
        tree: Node,
        problems: list[Problem],
        kind: type[Any],
        *,
        model_known: bool = True,
        ranks: int | None = None,
    ):
        self.tree, self.problems, self.kind, self.model_known, self.ranks = tree, problems, kind, model_known, ranks
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.meant: set[str] = set()
        self.config: Any = None
        self._derived: dict[str, Any] = {}
        self._plain: dict[str, Any] = {}
        self._keys: dict[int, str] = {}  # id of a mapping in `_plain` -> its dotted key
        self._stack: list[str] = []  # keys of the sections that are being validated
        self._sections: dict[str, type[BaseModel]] = {}  # dotted key -> class of the section there
        self._components: dict[str, ComponentClass | None] = {}  # dotted key -> class of the component there

    # ---- for rules

    def get(self, key: str) -> Any:
        """Returns a checked value; None if the key has a problem or is not set."""
        return self.values.get(key)

    def node(self, key: str) -> Node:
        """Returns the node of a dotted key or, if the file does not set the key, of the nearest section above it."""
        node = self.tree
        for part in key.split("."):
            below = node.get(part)
            if below is None:
                break
            node = below
        return node

    def report(self, key: str, what: str, *also: str) -> None:
        """Adds the problem `what` of the dotted key `key`, at a line of a file.

        The line is the first of these that exists: the line that sets `key`, the lines that set the keys in `also`, and
        the line of the nearest section that contains `key`. If `key` is a section, the lines of the keys in `also` come
        first.
        """
        node = self.tree.get(*key.split("."))
        for place in (*also, key) if node is not None and node.is_mapping else (key, *also):
            node = self.tree.get(*place.split("."))
            if node is not None and node.origin is None:
                self.problems.append(node.problem(key, what))
                return
        self.problems.append(self.node(key).problem(key, what))

    @property
    def complete(self) -> bool:
        """Whether every file that the run inherits from was read."""
        return "extends" not in self.meant

    def fill(self, key: str, value: Any, origin: str) -> None:
        """Sets the value and the origin of a dotted key whose value is derived from other values."""
        self.values[key], self.origins[key] = value, origin
        self._derived[key] = value

    # ---- validation

    def check(self) -> None:
        """Validates the tree. Sets `config` if the tree is valid; otherwise reports the errors."""
        self.tree = self._with_items(self.tree, self.kind, "")
        self._plain = self._as_plain(self.tree, "")
        for name, info in field_names(self.kind).items():
            optional = info.default is None  # such a section exists only if the file has it
            if section_class(info.annotation) is not None and name not in ("model", *self._plain) and not optional:
                self._plain[name] = self._as_plain(Node({}), name)
        while True:
            self.values.clear()
            try:
                self.config = self.kind.model_validate(self._plain, context=self)
                return
            except ValidationError as error:
                errors = [self._placed(found) for found in error.errors(include_url=False)]
            converted = {error.path: value for error in errors if (value := convert(error)) is not None}
            if not converted:
                self._report_errors(errors)
                return
            for path, value in converted.items():
                self._plain = replace_at(self._plain, path, value)

    def finish(self) -> Any:
        """Returns the configuration with the derived values."""
        config = self.config
        for (section, _, name), value in ((key.partition("."), value) for key, value in self._derived.items()):
            value = getattr(config, section).model_copy(update={name: value}) if name else value
            config = config.model_copy(update={section: value})
        return config

    def _with_items(self, node: Node, section: type[BaseModel], key: str) -> Node:
        """Replaces the strings in lists of sections by mappings: in `data.train`, "a" becomes `{store: a}`."""
        if not node.is_mapping:
            return node
        fields, content = field_names(section), dict(node.value)
        for name, below in content.items():
            annotation, inner = fields[name].annotation if name in fields else None, f"{key}.{name}" if key else name
            listed, under = listed_sections(annotation), section_class(annotation)
            if listed and isinstance(below.value, list):
                names = listed[0] if keeps_text(annotation) and issubclass(listed[0], Component) else None
                items = [
                    self._item(item, required_key(listed[0]) or "", names, f"{inner}[{number}]")
                    for number, item in enumerate(below.value)
                ]
                content[name] = replace(below, value=items)
            elif under is not None and not issubclass(under, Component):
                content[name] = self._with_items(below, under, inner)
        return replace(node, value=content)

    def _item(self, item: Node, required: str, names: type[Component] | None, key: str) -> Node:
        """Returns an item of a list of sections. A string becomes the mapping `{required: string}`.

        Args:
            item: the item as it is in the file.
            required: the first required key of the section class.
            names: class of the components in the list, if the list can contain short names of built-in components. Such
                a name is not replaced, and is reported if it is unknown.
            key: dotted key of the item.
        """
        if not isinstance(item.value, str):
            return item
        if names is None or ":" in item.value:
            return Node({required: item}, item.file, item.line)
        try:
            find_component(item.value, names.kind)
        except UserError as error:
            self.problems.append(item.problem(key, error.what))
        return item

    def _as_plain(self, node: Node, key: str) -> Any:
        """Returns a tree as plain data, and records the origins of its values and the dotted keys of its mappings."""
        if key and node.file is not None:
            self.origins[key] = node.place
        if isinstance(node.value, list):
            return [self._as_plain(item, f"{key}[{number}]") for number, item in enumerate(node.value)]
        if not node.is_mapping:
            return node.value
        found = {name: self._as_plain(below, f"{key}.{name}" if key else name) for name, below in node.value.items()}
        self._keys[id(found)] = key
        return found

    # ---- called by sections while pydantic validates them

    def section(self, section: type[BaseModel], data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        """Validates a section with pydantic's `handler`, and records the defaults of keys that `data` does not have."""
        key = self._keys.get(id(data)) if isinstance(data, dict) else None
        if key is None:
            return handler(data)
        self._sections[key] = section
        for name, info in field_names(section).items():
            if name not in data and not info.is_required() and info.default is not MISSING:
                inner = f"{key}.{name}" if key else name
                self.values[inner] = info.get_default(call_default_factory=True)
                self.origins.setdefault(inner, "default")
        self._stack.append(key)
        try:
            return handler(data)
        finally:
            self._stack.pop()

    def component(self, section: type[Component], data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        """Validates a component by the signature of the class that its `type` names.

        Args:
            section: the section class of the component's kind.
            data: the component's keys and values.
            handler: pydantic's validation of `section`, used if `data` is not from the file.
        """
        key = self._keys.get(id(data)) if isinstance(data, dict) else None
        if key is None:
            return handler(data)
        chosen = data.get("type", section.model_fields["type"].default)
        found, wrong = None, None
        try:
            found = find_component(chosen, section.kind) if isinstance(chosen, str) else None
        except UserError as error:
            wrong = error.what
        self._components[key] = found
        made = arguments_model(section, found, wrong).model_validate(data, context=self)
        extra = made.model_extra or {}
        self.values |= {f"{key}.{name}": value for name, value in extra.items()}
        given = {name: value for name, value in (values_by_key(made) | extra).items() if value is not MISSING}
        component = section.model_construct(**given)
        if self.origins.get(f"{key}.type", "default") != "default":
            component._place = f"{self.origins[f'{key}.type']}: {key}.type"
        return component

    def field(self, section: type[BaseModel], name: str, value: Any) -> None:
        """Records the valid value of a section's field `name`, even if other fields of the section have errors."""
        if self._stack and not isinstance(value, Section):
            name = section.model_fields[name].alias or name
            key = f"{self._stack[-1]}.{name}" if self._stack[-1] else name
            self.values[key] = values_by_key(value) | value.arguments if isinstance(value, Component) else value

    # ---- errors

    def _placed(self, error: ErrorDetails) -> FieldError:
        """Returns pydantic's error with its place in the file, found by the keys and indices of the error's `loc`."""
        key, node, kind = "", self.tree, error["type"]
        here: Any = self._plain
        path: list[int | str] = []
        branches: list[tuple[str, str]] = []
        for place, part in enumerate(error["loc"]):
            missing = error["type"] == "missing" and place == len(error["loc"]) - 1
            if isinstance(part, str) and not missing and not (isinstance(here, dict) and part in here):
                branches.append((key, part))
                continue
            if missing and isinstance(part, int):
                kind = "too_few"
                continue
            if missing:
                below = here = None
            elif isinstance(part, int):
                below, here = (node.value[part] if isinstance(node.value, list) else None), here[part]
            else:
                below, here = (node.value.get(part) if node.is_mapping else None), here[part]
            node = below or node
            key = f"{key}[{part}]" if isinstance(part, int) else f"{key}.{part}" if key else part
            path.append(part)
        above, _, name = key.rpartition(".")
        field = field_names(self._sections[above]).get(name) if above in self._sections else None
        return FieldError(key, node, kind, error.get("ctx") or {}, here, tuple(path), tuple(branches), field)

    def _report_errors(self, errors: list[FieldError]) -> None:
        """Reports errors, except errors that only follow from a misspelled key."""
        reported = {problem.key for problem in self.problems}
        groups = [group for group in resolve_unions(errors) if group[0].key not in reported]
        unknown = [(group[0], self._unknown(group[0])) for group in groups if group[0].type == "extra_forbidden"]
        # The keys of a component are not known if its `type` is misspelled.
        untyped = {key.removesuffix(".type") for key in self.meant if key.endswith(".type") and not self._written(key)}
        for error, (what, meant) in unknown:
            if meant == "type" or error.key.removesuffix(f".{error.path[-1]}") not in untyped:
                self.problems.append(error.node.problem(error.key, what))
        for group in groups:
            first = group[0]
            if first.type == "missing" and not self._may_be_set(first.key):
                self._report_missing(first, untyped)
            elif first.type not in ("missing", "extra_forbidden"):
                self.problems.append(first.node.problem(first.key, error_message(group)))
        for key in list(self.values):
            default = self.origins.get(key) == "default" and self._may_be_set(key)
            if default or key.partition(".")[0] in untyped - {"model"}:
                del self.values[key]

    def _report_missing(self, error: FieldError, untyped: set[str]) -> None:
        above, _, name = error.key.rpartition(".")
        component = self._components.get(above)
        if above in untyped:
            return
        if component is not None and name in component.arguments:
            self.problems.append(error.node.problem(error.key, f"required argument of {component.name}; add the key"))
        else:
            known = descriptions(Component) | descriptions(self._sections.get(above, self.kind))
            purpose = known.get(name, "A value").partition(". ")[0].rstrip(".")
            self.report(error.key, f"required: {REQUIRED.get(error.key, purpose[0].lower() + purpose[1:])}; add it")

    def _may_be_set(self, key: str) -> bool:
        """Whether a missing key may be in the file under a misspelled name, or in a file that could not be read."""
        if not self.complete or (key.startswith("model.") and not self.model_known):
            return True
        above = [meant for meant in self.meant if key.startswith(f"{meant}.")]
        return key in self.meant or any(not self._written(meant) for meant in above)

    def _written(self, key: str) -> bool:
        return self.tree.get(*key.split(".")) is not None

    def _unknown(self, error: FieldError) -> tuple[str, str | None]:
        """Returns the message for an unknown key, and the key that was most likely meant."""
        key = str(error.path[-1])  # which can contain dots
        section = error.key.removesuffix(key).removesuffix(".")
        if (renamed := RENAMED.get(error.key)) is not None:
            self.meant.add(renamed)
            name = renamed.rpartition(".")[2]
            return f"this key is now called {name!r}; rename it", name
        component = self._components.get(section)
        fields = field_names(self._sections[section])
        known = [name for name in fields if component is None or name not in component.injected]
        known = known if section else [*known, "extends"]
        everywhere = {*known_keys(self.kind), "extends"}
        for place in ("optimizer", "schedule"):
            component = self._components.get(place) or find_component(TYPES[place], place)
            everywhere |= {f"{place}.{name}" for name in component.arguments}
        meant, note = meant_key(section, key, known, everywhere)
        if meant is not None and (meant != "extends" or not section):
            self.meant.add(f"{section}.{meant}" if section and meant in known else meant)
            self.model_known &= self.meant.isdisjoint(("model.preset", "model.from", "model.type"))
        return unknown_key(meant, note, known), meant

"""A run's tree on its way to a `RunConfig`: validated by pydantic, with all problems gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ModelWrapValidatorHandler, ValidationError
from pydantic_core import ErrorDetails

from weft.config.components import Part, arguments_model, find_part
from weft.config.error_messages import Mistake, converted, message, settle, spell
from weft.config.fields import field_names, keeps_text, known_keys, listed_sections, required_key, section_class
from weft.config.inherit import TYPES
from weft.config.section import Component, Section
from weft.config.sections import RunSections
from weft.config.signature import MISSING
from weft.config.suggest import RENAMED, meant_key, unknown_key
from weft.config.tree import Node
from weft.errors import Problem, UserError

# What a key that must be there is for.
_SIZE = "a size of the decoder, or name a preset, as preset: llama-60m"
REQUIRED = {
    "model": "what to train, as model: llama-60m",
    "data.train": "the token store to learn from (`weft data pack` makes one)",
    **dict.fromkeys(("model.hidden_size", "model.num_hidden_layers", "model.num_attention_heads"), _SIZE),
}

_Run = TypeVar("_Run", bound=RunSections)


class Draft(Generic[_Run]):
    """What is known of a run so far. It is the context that pydantic validates the sections with.

    Attributes:
        tree: the merged file.
        values: dotted key -> validated value, defaults filled in; a key with a problem is not in it. A component is a
            mapping; of any other section there are the keys alone.
        origins: dotted key -> where the value came from.
        problems: all found.
        meant: keys that misspelt ones were meant to be: they are not missed, and have no default.
        ranks: that the run has; None if that is not known.
        model_known: False if a preset or checkpoint could not be read: so with all keys that it would have.
    """

    def __init__(self, tree: Node, problems: list[Problem], *, model_known: bool = True, ranks: int | None = None):
        self.tree, self.problems, self.model_known, self.ranks = tree, problems, model_known, ranks
        self.meant: set[str] = set()
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.config: _Run | None = None
        self._plain: dict[str, Any] = {}
        self._filled: set[str] = set()
        self._keys: dict[int, str] = {}  # of the mappings of `_plain`, by their ids
        self._above: list[str] = []  # the sections that are being validated
        self._sections: dict[str, type[BaseModel]] = {}  # dotted key -> what a mapping was validated as
        self._parts: dict[str, Part | None] = {}  # dotted key -> a component's class

    # ---- for the rules between keys

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
        self._filled.add(key)

    # ---- validation

    def check(self, kind: type[_Run]) -> None:
        """Validate the whole tree as `kind`; sets `config` if nothing is wrong."""
        self.tree = self._with_items(self.tree, kind, "")
        self._plain = self._as_plain(self.tree, "")
        for name, info in field_names(kind).items():
            if section_class(info.annotation) is not None and name not in ("model", *self._plain):
                self._plain[name] = self._as_plain(Node({}), name)
        while True:
            self.values.clear()
            try:
                self.config = kind.model_validate(self._plain, context=self)
                return
            except ValidationError as error:
                mistakes = [self._mistake(found) for found in error.errors(include_url=False)]
            if not self._convert(mistakes):
                self._tell(mistakes)
                return

    def finish(self) -> _Run:
        """The config, with what rules have filled in."""
        assert self.config is not None
        changed: dict[str, Any] = {}
        for key in self._filled:
            section, _, name = key.partition(".")
            before = changed.get(section) or getattr(self.config, section)
            changed[section] = before.model_copy(update={name: self.values[key]})
        whole = self.config.model_copy(update=changed)
        whole._origins.update(self.origins)
        return whole

    def _with_items(self, node: Node, section: type[BaseModel], key: str) -> Node:
        """A tree whose lists of sections have mappings: a text stands for one with the required key alone."""
        fields, content = field_names(section), dict(node.value) if node.is_mapping else {}
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
        return replace(node, value=content) if node.is_mapping else node

    def _item(self, item: Node, required: str, names: type[Component] | None, key: str) -> Node:
        """An item of a list of sections; `names` if a built-in's name may stay one."""
        if not isinstance(item.value, str):
            return item
        if names is None or ":" in item.value:
            return Node({required: item}, item.file, item.line)
        try:
            find_part(item.value, names.kind)
        except UserError as error:
            self.problems.append(item.problem(key, error.what))
        return item

    def _as_plain(self, node: Node, key: str) -> Any:
        """A tree as plain data, whose mappings are known by their ids."""
        if key and node.file is not None:
            self.origins[key] = node.place
        if isinstance(node.value, list):
            return [self._as_plain(item, f"{key}[{number}]") for number, item in enumerate(node.value)]
        if not node.is_mapping:
            return node.value
        found = {name: self._as_plain(below, f"{key}.{name}" if key else name) for name, below in node.value.items()}
        self._keys[id(found)] = key
        return found

    # ---- what the sections call while pydantic validates them

    def section(self, section: type[BaseModel], data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        """Validate a section, and note which keys have their defaults."""
        key = self._keys.get(id(data)) if isinstance(data, dict) else None
        if key is None:
            return handler(data)
        self._sections[key] = section
        for name, info in field_names(section).items():
            if name not in data and not info.is_required() and info.default is not MISSING:
                self._note(f"{key}.{name}" if key else name, info.get_default(call_default_factory=True))
        self._above.append(key)
        try:
            return handler(data)
        finally:
            self._above.pop()

    def _note(self, key: str, value: Any) -> None:
        self.values[key] = value
        self.origins.setdefault(key, "default")

    def component(self, section: type[Component], data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        """Validate a component by the signature of the class that its `type` means."""
        key = self._keys.get(id(data)) if isinstance(data, dict) else None
        if key is None:
            return handler(data)
        part, model = _class_of(section, data)
        self._parts[key] = part
        made = model.model_validate(data, context=self)
        found = {name: getattr(made, field) for field, name in _aliases(type(made))} | (made.model_extra or {})
        for name in made.model_extra or ():
            self.values[f"{key}.{name}"] = found[name]
        component = section.model_construct(**{name: value for name, value in found.items() if value is not MISSING})
        if self.origins.get(f"{key}.type", "default") != "default":
            component._place = f"{self.origins[f'{key}.type']}: {key}.type"
        return component

    def field(self, section: type[BaseModel], name: str, value: Any) -> None:
        """Note a value that is right."""
        if not self._above or isinstance(value, Section):
            return
        name = section.model_fields[name].alias or name
        if isinstance(value, Component):
            own = {alias: getattr(value, field) for field, alias in _aliases(type(value))}
            value = own | value.arguments
        self.values[f"{self._above[-1]}.{name}" if self._above[-1] else name] = value

    # ---- errors

    def _mistake(self, error: ErrorDetails) -> Mistake:
        """An error in its place. What stands in its location beside keys and indices are branches of unions."""
        key, node = "", self.tree
        here: Any = self._plain
        path: list[int | str] = []
        branches: list[tuple[str, str]] = []
        kind = error["type"]
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
        return Mistake(key, node, kind, error.get("ctx") or {}, here, tuple(path), tuple(branches), field)

    def _convert(self, mistakes: list[Mistake]) -> bool:
        """Whether something is right in other words: it has been replaced, to be validated once more."""
        right = {mistake.path: value for mistake in mistakes if (value := converted(mistake)) is not None}
        for path, value in right.items():
            self._plain = _replaced(self._plain, path, value)
        return bool(right)

    def _tell(self, mistakes: list[Mistake]) -> None:
        """Note the problems, without what follows from a misspelt key."""
        told = {problem.key for problem in self.problems}
        groups = [group for group in settle(mistakes) if group[0].key not in told]
        unknown = [(group[0], self._unknown(group[0])) for group in groups if group[0].type == "extra_forbidden"]
        # Of a component whose `type` is misspelt, it is not known which keys it has.
        untold = {key.removesuffix(".type") for key in self.meant if key.endswith(".type") and not self._written(key)}
        for mistake, (what, meant) in unknown:
            if meant == "type" or mistake.key.rpartition(".")[0] not in untold:
                self.problems.append(mistake.node.problem(mistake.key, what))
        for group in groups:
            first = group[0]
            above, _, name = first.key.rpartition(".")
            part = self._parts.get(above)
            if first.type == "missing":
                if self._expected(first.key) or above in untold:
                    continue
                if part is not None and name in part.arguments:
                    self.problems.append(first.node.problem(first.key, f"required by {part.name}; add it"))
                else:
                    said = first.field.description if first.field is not None else None
                    what = REQUIRED.get(first.key) or said or "give it a value"
                    self.problem(first.key, f"required: {what}; add it")
            elif first.type != "extra_forbidden":
                self.problems.append(first.node.problem(first.key, message(group)))
        for key in list(self.values):
            default = self.origins.get(key) == "default" and self._expected(key)
            if default or key.partition(".")[0] in untold - {"model"}:
                del self.values[key]

    def _expected(self, key: str) -> bool:
        """Whether a key that is not there may be there all the same: misspelt, or in a file that could not be read."""
        if not self.whole or (key.startswith("model.") and not self.model_known):
            return True
        above = [meant for meant in self.meant if key.startswith(f"{meant}.")]
        return key in self.meant or any(not self._written(meant) for meant in above)

    def _written(self, key: str) -> bool:
        return self.tree.get(*key.split(".")) is not None

    def _unknown(self, mistake: Mistake) -> tuple[str, str | None]:
        """What to say about a key that does not exist, and what it was meant to be."""
        section, _, key = mistake.key.rpartition(".")
        if (renamed := RENAMED.get(mistake.key)) is not None:
            self.meant.add(renamed)
            name = renamed.rpartition(".")[2]
            return f"this key is now called {name!r}; rename it", name
        part = self._parts.get(section)
        fields = field_names(self._sections[section])
        known = [name for name in fields if part is None or name not in part.injected]
        known = known if section else [*known, "extends"]
        everywhere = {*known_keys(RunSections), "extends"}
        for home in ("optimizer", "schedule"):
            part = self._parts.get(home) or find_part(TYPES[home], home)
            everywhere |= {f"{home}.{name}" for name in part.arguments}
        meant, note = meant_key(section, key, known, everywhere)
        if meant is not None and (meant != "extends" or not section):
            self.meant.add(f"{section}.{meant}" if section and meant in known else meant)
            self.model_known &= self.meant.isdisjoint(("model.preset", "model.from", "model.type"))
        return unknown_key(meant, note, known), meant


def _class_of(section: type[Component], data: dict[str, Any]) -> tuple[Part | None, type[BaseModel]]:
    """The class that a component's `type` means, if there is one, and what validates the component."""
    chosen = data.get("type", section.model_fields["type"].default)
    try:
        part = find_part(chosen, section.kind) if isinstance(chosen, str) else None
    except UserError as error:
        return None, arguments_model(section, None, error.what)
    return part, arguments_model(section, part)


def _aliases(section: type[BaseModel]) -> list[tuple[str, str]]:
    """A section's fields, as Python and as a file have them."""
    return [(name, info.alias or name) for name, info in section.model_fields.items()]


def _replaced(tree: Any, path: Sequence[int | str], value: Any) -> Any:
    """Plain data with another value in a place; only tuples are made anew."""
    if not path:
        return value
    inner = _replaced(tree[path[0]], path[1:], value)
    if isinstance(tree, tuple):
        return tuple(inner if place == path[0] else item for place, item in enumerate(tree))
    tree[path[0]] = inner
    return tree


def node_of(value: Any, like: Node, origin: str) -> Node:
    """Plain data as a tree whose mistakes are told at `like`'s place."""
    if isinstance(value, dict):
        return Node(
            {name: node_of(item, like, origin) for name, item in value.items()}, like.file, like.line, None, origin
        )
    if isinstance(value, list):
        return Node([node_of(item, like, origin) for item in value], like.file, like.line, None, origin)
    return Node(value, like.file, like.line, spell(value), origin)

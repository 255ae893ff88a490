"""YAML files as trees that know where each key stands."""

from __future__ import annotations

import difflib
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, Problem

COMMAND_LINE = "command line"
_MOST_NODES = 100_000  # a file whose aliases expand to more is no config
_DEEPEST = 64  # levels of nesting; no key is deeper than a few
# ${NAME} of the environment. While YAML is parsed, its braces are two characters that mean nothing there.
_VARIABLE = re.compile(r"(\$+)\{([A-Za-z_]\w*)\}")
_HIDDEN = re.compile("(\\$+)\ue000([A-Za-z_]\\w*)\ue001")
_CORE = ("null", "bool", "int", "float", "str", "seq", "map", "timestamp", "value")  # YAML's own kinds


@dataclass(frozen=True)
class Node:
    """A value and its place.

    Attributes:
        value: a dict or list of Nodes, or a scalar (str, int, float, bool, None).
        file: what to call the file in a message; "command line" for an override.
        line: of the value's key (of a list's item), counted from 1.
        text: a scalar as it was written.
        origin: where the value came from, if that is no file ("preset llama-tiny", "default").
        replaces: in a file that inherits: takes the place of the base's mapping instead of merging with it.
    """

    value: Any
    file: str | None = None
    line: int | None = None
    text: str | None = None
    origin: str | None = None
    replaces: bool = False

    @property
    def is_mapping(self) -> bool:
        """Whether it is a dict of Nodes."""
        return isinstance(self.value, dict)

    def plain(self) -> Any:
        """Plain data."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value

    def get(self, *path: str) -> Node | None:
        """The node below, or None. A list's items are `"train[0]"`, ..."""
        node: Node | None = self
        for key in path:
            name, bracket, number = key.partition("[")
            below = node.value.get(key) if node is not None and node.is_mapping else None
            if below is None and bracket and node is not None and node.is_mapping:
                items = node.value.get(name)
                place = int(number[:-1]) if number[:-1].isdecimal() else -1
                if items is not None and isinstance(items.value, list) and 0 <= place < len(items.value):
                    below = items.value[place]
            node = below
        return node

    def problem(self, key: str, what: str) -> Problem:
        """A mistake in this place."""
        return Problem(key, what, self.file, self.line)

    @property
    def place(self) -> str:
        """For `weft config show --origin`."""
        if self.origin is not None:
            return self.origin
        return f"{self.file}:{self.line}" if self.line is not None else str(self.file)


def read_file(path: Path, label: str, problems: list[Problem], asked: Problem | None = None) -> Node | None:
    """Parse a file.

    Args:
        path: the file.
        label: what to call it in messages.
        problems: mistakes are added here.
        asked: the problem to report if the file is not there; by default one that names `label`.

    Returns:
        A mapping, or None if there is nothing to go on with.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        problems.append(Problem("", "this is not UTF-8 text; save the file as UTF-8", label, line))
        return None
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            what = f"there is no such file{_similar(path, asked.file if asked else None)}"
        elif path.is_dir():
            what = f"this is a directory; name a YAML file{_similar(path / 'run.yaml')}"
        else:
            what = f"it cannot be read: {error.strerror}; check the path and its permissions"
        problems.append(
            Problem(asked.key, f"{label}: {what}", asked.file, asked.line) if asked else Problem("", what, label)
        )
        return None
    return parse_mapping(text, label, problems)


def parse_mapping(text: str, label: str, problems: list[Problem]) -> Node | None:
    """Parse a whole file's text, which must be a mapping."""
    node = parse(text, label, problems)
    if node is None:
        return None
    if node.value is None:
        problems.append(Problem("", "the file is empty; it needs at least model, data and training", label, 1))
        return None
    if not node.is_mapping:
        found = "a list" if isinstance(node.value, list) else "a single value"
        problems.append(
            Problem("", f"the file is {found}; it must be a mapping, as `model: llama-60m`", label, node.line)
        )
        return None
    return node


def parse(text: str, label: str, problems: list[Problem], *, numbered: bool = True) -> Node | None:
    """Parse one YAML 1.2 document. None (and a problem) where it is none."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.reader import ReaderError

    reader = YAML(typ="safe", pure=True)
    reader.max_depth = _DEEPEST
    try:
        root = reader.compose(_VARIABLE.sub("\\1\ue000\\2\ue001", text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if type(error).__name__ == "MaxDepthExceededError":
            problems.append(Problem("", _TOO_DEEP, label, mark.line + 1 if mark is not None and numbered else None))
            return None
        what = " ".join(filter(None, [error.problem, error.context and f"({error.context})"])) or "not YAML"
        tab = "; indent with spaces, not tabs" if "'\\t'" in what else ""
        line = mark.line + 1 if mark is not None and numbered else None
        problems.append(
            Problem("", f"not valid YAML: {' '.join(what.split())}{tab or '; mend the syntax here'}", label, line)
        )
        return None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1 if numbered else None
        code = f"U+{ord(text[error.position]):04X}"
        problems.append(Problem("", f"not valid YAML: the character {code} is no text; remove it", label, line))
        return None
    except RecursionError:  # ruamel.yaml before 0.19 knows no depth
        problems.append(Problem("", _TOO_DEEP, label, None))
        return None
    except (YAMLError, ValueError) as error:
        problems.append(Problem("", f"not valid YAML: {' '.join(str(error).split())}; mend the syntax", label, None))
        return None
    if root is None:
        return Node(None, label, 1 if numbered else None)
    return _Builder(label, problems, numbered, reader.resolver).build(root, root, "")


def without_variables(text: str) -> str:
    """A text that is itself when it is read, though it has `${NAME}` in it."""
    return _VARIABLE.sub(r"$\1{\2}", text)


_TOO_DEEP = f"nested too deeply (more than {_DEEPEST} levels); close a bracket, or write it flatter"


class _Builder:
    """Turns ruamel's nodes into ours."""

    def __init__(self, label: str, problems: list[Problem], numbered: bool, resolver: Any):
        self.label, self.problems, self.numbered, self.resolver = label, problems, numbered, resolver
        self.above: list[int] = []
        self.count = 0

    def build(self, node: Any, key_node: Any, key: str) -> Node:
        line = key_node.start_mark.line + 1 if self.numbered else None
        self.count += 1
        if self.count > _MOST_NODES or id(node) in self.above:
            what = "an alias that contains itself" if id(node) in self.above else "aliases that expand without end"
            raise ConfigError([Problem(key, f"{what}; write the value out", self.label, line)])
        if len(self.above) > _DEEPEST:  # through aliases
            raise ConfigError([Problem("", _TOO_DEEP, self.label, line)])
        kind = str(node.tag or "").removeprefix("tag:yaml.org,2002:")
        if kind not in _CORE:
            tag = f"!!{kind}" if str(node.tag).startswith("tag:yaml.org,2002:") else node.tag
            self.problems.append(
                Problem(key, f"tags are not allowed, and {tag} is one; write the plain value", self.label, line)
            )
        self.above.append(id(node))
        try:
            if node.id == "mapping":
                return Node(self.mapping(node, key), self.label, line)
            if node.id == "sequence":
                items = [self.build(item, item, f"{key}[{i}]") for i, item in enumerate(node.value)]
                return Node(items, self.label, line)
            text = self.expand(node.value, key, line)
            if text != node.value and node.style is None:  # a plain scalar: what it is, is said by what it has become
                kind = str(self.resolver.resolve(type(node), text, (True, False))).rpartition(":")[2]
            return Node(_scalar(text, kind), self.label, line, text)
        finally:
            self.above.pop()

    def expand(self, text: str, key: str, line: int | None) -> str:
        """A text with `${NAME}` and a leading `~/` as the environment has them; what they stand for is not expanded."""

        def value(match: re.Match[str]) -> str:
            dollars, name = match.groups()
            if len(dollars) > 1:
                return f"{dollars[1:]}{{{name}}}"
            if name not in os.environ:
                remedy = f"set it, or write $${{{name}}} for this text"
                what = f"${{{name}}}: the environment has no variable {name}; {remedy}"
                self.problems.append(Problem(key, what, self.label, line))
            return os.environ.get(name, f"${{{name}}}")

        home = os.path.expanduser("~") if text.startswith("~/") else ""
        return home + _HIDDEN.sub(value, text[1:] if home else text)

    def mapping(self, node: Any, above: str) -> dict[str, Node]:
        found: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1 if self.numbered else None
            if key_node.id != "scalar":
                self.problems.append(
                    Problem(above, "a key must be a word; quote it or write it plainly", self.label, line)
                )
                continue
            name = _HIDDEN.sub(r"\1{\2}", str(key_node.value))
            key = f"{above}.{name}" if above else name
            child = self.build(value_node, key_node, key)
            if name == "<<" and not key_node.style:
                for part in child.value if isinstance(child.value, list) else [child]:
                    merged = {**(part.value if part.is_mapping else {}), **merged}
            elif name in found:
                first = found[name].line
                said = f" (first on line {first})" if first is not None else ""
                self.problems.append(Problem(key, f"this key is here twice{said}; keep one of them", self.label, line))
            else:
                found[name] = child
        return {**merged, **found}


def _scalar(text: str, kind: str) -> Any:
    """A scalar's value; its text where it is no value of its kind."""
    try:
        if kind == "null":
            return None
        if kind == "bool" and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind == "int":
            return _integer(text)
        if kind == "float":
            return _real(text)
    except ValueError:
        pass
    return text


def _integer(text: str) -> int:
    digits = text.replace("_", "").lower()
    sign = -1 if digits.startswith("-") else 1
    digits = digits.lstrip("+-")
    for prefix, base in (("0x", 16), ("0o", 8), ("0b", 2)):
        if digits.startswith(prefix):
            return sign * int(digits[2:], base)
    return sign * int(digits)


def _real(text: str) -> float:
    plain = text.replace("_", "").lower()
    if plain.lstrip("+-") in (".inf", ".nan"):
        return math.nan if plain.endswith("nan") else -math.inf if plain.startswith("-") else math.inf
    return float(plain)


def _similar(path: Path, asking: str | None = None) -> str:
    """Files beside a missing one, in words, without the one that names it."""
    folder = path.parent
    if not folder.is_dir():
        return f" (there is no directory {folder} either)"
    names = sorted(p.name for p in folder.iterdir() if p.suffix in (".yaml", ".yml") and not p.name.startswith("."))
    names = [name for name in names if asking is None or not os.path.samefile(folder / name, asking)]
    stems = {Path(name).stem: name for name in names}
    near = difflib.get_close_matches(path.stem, stems, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {str(folder / stems[near[0]])!r}?"
    return f"; there are {', '.join(names[:8])}" if names else "; check the path"


# ---- merging


def merge(base: Node, child: Node, key: str = "", types: dict[str, str] | None = None) -> Node:
    """The child over the base: mappings merge, everything else is replaced.

    Args:
        key: the dotted name of both.
        types: what a section's `type` is if it is not written. With it, a mapping that chooses another `type` replaces
            the base's, because what stands beside a `type` are that class's arguments; so does a `model` that chooses
            `from` where the base had a `preset`, and the reverse.
    """
    if key == "model" and child.is_mapping and isinstance(base.value, str):
        base = Node({"preset": base}, base.file, base.line)
    if not (base.is_mapping and child.is_mapping) or child.replaces:
        return child
    if types is not None and (
        _other_type(base, child, types.get(key)) or (key == "model" and _other_source(base, child))
    ):
        return child
    merged = dict(base.value)
    for name, node in child.value.items():
        merged[name] = merge(merged[name], node, f"{key}.{name}" if key else name, types) if name in merged else node
    place = base if child.file == COMMAND_LINE else child
    return Node(merged, place.file, place.line, replaces=base.replaces)


def _other_type(base: Node, child: Node, default: str | None) -> bool:
    chosen, before = child.get("type"), base.get("type")
    if chosen is None:
        return False
    now, then = str(chosen.value), default if before is None else str(before.value)
    return then is None or now.replace("-", "_") != then.replace("-", "_")


def _other_source(base: Node, child: Node) -> bool:
    return any(
        name in child.value and other in base.value and other not in child.value
        for name, other in (("from", "preset"), ("preset", "from"))
    )

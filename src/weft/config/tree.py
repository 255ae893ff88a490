"""Parses YAML files to trees of `Node`s, which have a file and a line, and merges such trees."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, Problem

COMMAND_LINE = "command line"
_MOST_NODES = 100_000  # aliases that expand to more nodes are an error or an attack
_DEEPEST = 64  # levels of nesting
# ${NAME} of the environment. While YAML is parsed, private characters take the place of its braces.
_VARIABLE = re.compile(r"(\$+)\{([A-Za-z_]\w*)\}")
_HIDDEN = re.compile("(\\$+)\ue000([A-Za-z_]\\w*)\ue001")
_CORE = ("null", "bool", "int", "float", "str", "seq", "map", "timestamp", "value")  # the tags of YAML 1.2
_BASES = {"0x": 16, "0o": 8, "0b": 2}


@dataclass(frozen=True)
class Node:
    """A value and its place in a file.

    Attributes:
        value: a dict or list of Nodes, or a scalar (str, int, float, bool, None).
        file: the file's name in messages; "command line" for an override.
        line: line of the value's key or of the list item, counted from 1.
        text: a scalar as it is written in the file.
        origin: origin of a value that is not from a file, such as "preset llama-tiny" or "default".
        replaces: whether the value replaces an inherited mapping instead of being merged with it.
    """

    value: Any
    file: str | None = None
    line: int | None = None
    text: str | None = None
    origin: str | None = None
    replaces: bool = False

    @property
    def is_mapping(self) -> bool:
        """Whether the value is a dict of Nodes."""
        return isinstance(self.value, dict)

    def plain(self) -> Any:
        """Returns the value as plain data: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value

    def get(self, *path: str) -> Node | None:
        """Returns the node at a path of keys; None if there is none. `"train[0]"` is the first item of `train`."""
        node: Node | None = self
        for key in path:
            if node is None or not node.is_mapping:
                return None
            name, _, number = key.partition("[")
            below = node.value.get(key)
            if below is None and number[:-1].isdecimal() and isinstance((items := node.value.get(name)), Node):
                found = items.value if isinstance(items.value, list) else []
                below = found[int(number[:-1])] if int(number[:-1]) < len(found) else None
            node = below
        return node

    def problem(self, key: str, what: str) -> Problem:
        """Returns a `Problem` of the dotted key `key`, with this node's file and line."""
        return Problem(key, what, self.file, self.line)

    @property
    def place(self) -> str:
        """The origin of the value, as `weft config show --origin` prints it."""
        if self.origin is not None:
            return self.origin
        return f"{self.file}:{self.line}" if self.line is not None else str(self.file)


def read_file(path: Path, label: str, problems: list[Problem], asked: Problem | None = None) -> Node | None:
    """Parses a file, which must be a mapping.

    Args:
        path: the file.
        label: the file's name in messages.
        problems: problems are added to this list.
        asked: the key and line in another file that name this file. If this file cannot be read, the problem is
            reported at that line. None: the problem is reported at this file.

    Returns:
        The mapping; None if the file cannot be read or is not a mapping.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        problems.append(Problem("", "not UTF-8 text; save the file as UTF-8", label, line))
        return None
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            what = f"no such file{_similar(path, asked.file if asked else None)}"
        elif isinstance(error, IsADirectoryError):
            what = f"a directory, not a file; name a YAML file{_similar(path / 'run.yaml')}"
        else:
            what = f"cannot be read: {error.strerror}; check the path and its permissions"
        problems.append(
            Problem(asked.key, f"{label}: {what}", asked.file, asked.line) if asked else Problem("", what, label)
        )
        return None
    node = parse(text, label, problems)
    if node is None or node.is_mapping:
        return node
    if node.value is None:
        problems.append(Problem("", "the file is empty; write at least model, data and training", label, 1))
    else:
        found = "a list" if isinstance(node.value, list) else "a single value"
        what = f"the file is {found}; it must be a mapping, such as `model: llama-60m`"
        problems.append(Problem("", what, label, node.line))
    return None


def parse(text: str, label: str, problems: list[Problem], *, numbered: bool = True) -> Node | None:
    """Parses one YAML 1.2 document.

    Args:
        label: the file's name in messages.
        problems: problems are added to this list.
        numbered: whether nodes and problems have line numbers.

    Returns:
        The root node; None if the text is not valid YAML.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.reader import ReaderError

    def line_of(mark: Any) -> int | None:
        return mark.line + 1 if mark is not None and numbered else None

    reader = YAML(typ="safe", pure=True)
    reader.max_depth = _DEEPEST
    line: int | None = None
    try:
        root = reader.compose(_VARIABLE.sub("\\1\ue000\\2\ue001", text))
        if root is None:
            return Node(None, label, 1 if numbered else None)
        return _Builder(label, problems, numbered, reader.resolver).build(root, root, "")
    except MarkedYAMLError as error:
        line = line_of(error.problem_mark or error.context_mark)
        what = " ".join(filter(None, [error.problem, error.context and f"({error.context})"])) or "not YAML"
        remedy = "indent with spaces, not tabs" if "'\\t'" in what else "correct the syntax here"
        what = f"not valid YAML: {' '.join(what.split())}; {remedy}"
        if type(error).__name__ == "MaxDepthExceededError":
            what = _TOO_DEEP
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1 if numbered else None
        what = f"not valid YAML: the character U+{ord(text[error.position]):04X} is not text; remove it"
    except RecursionError:  # ruamel.yaml before 0.19 does not limit the depth
        what = _TOO_DEEP
    except (YAMLError, ValueError) as error:
        what = f"not valid YAML: {' '.join(str(error).split())}; correct the syntax"
    problems.append(Problem("", what, label, line))
    return None


def without_variables(text: str) -> str:
    """Escapes `${NAME}` in a text, so that reading it as YAML does not insert environment variables."""
    return _VARIABLE.sub(r"$\1{\2}", text)


_TOO_DEEP = f"nested too deeply (more than {_DEEPEST} levels); close a bracket, or nest it less"


class _Builder:
    """Converts ruamel.yaml's nodes to `Node`s."""

    def __init__(self, label: str, problems: list[Problem], numbered: bool, resolver: Any):
        self.label, self.problems, self.numbered, self.resolver = label, problems, numbered, resolver
        self.above: list[int] = []
        self.count = 0

    def report(self, key: str, what: str, line: int | None) -> None:
        self.problems.append(Problem(key, what, self.label, line))

    def build(self, node: Any, key_node: Any, key: str) -> Node:
        line = key_node.start_mark.line + 1 if self.numbered else None
        self.count += 1
        if self.count > _MOST_NODES or id(node) in self.above:
            what = "the alias contains itself" if id(node) in self.above else "the aliases expand without end"
            raise ConfigError([Problem(key, f"{what}; write the value without aliases", self.label, line)])
        if len(self.above) > _DEEPEST:  # through aliases
            raise ConfigError([Problem("", _TOO_DEEP, self.label, line)])
        kind = str(node.tag or "").removeprefix("tag:yaml.org,2002:")
        if kind not in _CORE:
            tag = f"!!{kind}" if str(node.tag).startswith("tag:yaml.org,2002:") else node.tag
            self.report(key, f"the tag {tag} is not allowed; remove the tag, and write a plain value", line)
        self.above.append(id(node))
        try:
            if node.id == "mapping":
                return Node(self.mapping(node, key), self.label, line)
            if node.id == "sequence":
                items = [self.build(item, item, f"{key}[{i}]") for i, item in enumerate(node.value)]
                return Node(items, self.label, line)
            text = self.expand(node.value, key, line)
            if text != node.value and node.style is None:  # the type of an unquoted scalar is that of the expanded text
                kind = str(self.resolver.resolve(type(node), text, (True, False))).rpartition(":")[2]
            return Node(_scalar(text, kind), self.label, line, text)
        finally:
            self.above.pop()

    def expand(self, text: str, key: str, line: int | None) -> str:
        """Replaces `${NAME}` and a leading `~/` in a scalar. The result is not expanded again.

        Args:
            key, line: dotted key and line of the scalar, for problems.
        """

        def value(match: re.Match[str]) -> str:
            dollars, name = match.groups()
            if len(dollars) > 1:
                return f"{dollars[1:]}{{{name}}}"
            if name not in os.environ:
                remedy = f"set the variable, or write $${{{name}}} for the literal text"
                self.report(key, f"${{{name}}}: the environment has no variable {name}; {remedy}", line)
            return os.environ.get(name, f"${{{name}}}")

        home = os.path.expanduser("~") if text.startswith("~/") else ""
        return home + _HIDDEN.sub(value, text[1:] if home else text)

    def mapping(self, node: Any, above: str) -> dict[str, Node]:
        found: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1 if self.numbered else None
            if key_node.id != "scalar":
                self.report(above, "a key must be a plain word; remove its brackets or other syntax, or quote it", line)
                continue
            name = _HIDDEN.sub(r"\1{\2}", str(key_node.value))
            key = f"{above}.{name}" if above else name
            child = self.build(value_node, key_node, key)
            if name == "<<" and not key_node.style:
                for part in child.value if isinstance(child.value, list) else [child]:
                    merged = {**(part.value if part.is_mapping else {}), **merged}
            elif name in found:
                first = found[name].line
                also = f" (first on line {first})" if first is not None else ""
                self.report(key, f"duplicate key{also}; keep one of them", line)
            else:
                found[name] = child
        return {**merged, **found}


def _scalar(text: str, kind: str) -> Any:
    """Converts the text of a scalar to a value. If the text is not valid for the tag `kind`, returns the text.

    Args:
        text: the scalar as it is written in the file.
        kind: the scalar's tag: "null", "bool", "int", "float" or "str".
    """
    lower = text.lower()
    number = lower.replace("_", "")
    try:
        if kind == "null":
            return None
        if kind == "bool" and lower in ("true", "false"):
            return lower == "true"
        if kind == "int":
            return int(number, _BASES.get(number.lstrip("+-")[:2], 10))
        if kind == "float":
            return float(number.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        pass
    return text


def _similar(path: Path, asking: str | None = None) -> str:
    """Returns a hint for a missing file: similar YAML files in its folder.

    Args:
        path: the missing file.
        asking: the file that names the missing file, which is not suggested.
    """
    folder = path.parent
    if not folder.is_dir():
        return f" (the directory {folder} does not exist either)"
    names = sorted(p.name for p in folder.iterdir() if p.suffix in (".yaml", ".yml") and not p.name.startswith("."))
    names = [name for name in names if asking is None or not os.path.samefile(folder / name, asking)]
    stems = {Path(name).stem: name for name in names}
    near = difflib.get_close_matches(path.stem, stems, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {str(folder / stems[near[0]])!r}?"
    return f"; use one of {', '.join(names[:8])}" if names else "; check the path"


def wrong_folder_hint(node: Node, path: str) -> str:
    """Returns a hint for the message about a missing path; "" unless the path exists relative to the YAML file.

    Args:
        node: node of the value in the YAML file.
        path: the missing path.
    """
    folder = os.path.dirname(node.file or "")
    there = os.path.normpath(os.path.join(folder, path))
    if not folder or node.file == COMMAND_LINE or os.path.exists(path) or not os.path.exists(there):
        return ""
    return f"not found; paths are relative to the working directory: run Weft from {folder}, or write {there}"


# ---- merging


def merge(base: Node, child: Node, key: str = "", types: dict[str, str] | None = None) -> Node:
    """Returns `base` with the values of `child`, which take precedence: mappings are merged, other values replaced.

    Args:
        key: dotted key of both nodes.
        types: dotted key of a section -> its default `type`. If given, a section of `child` that sets another `type`
            than the section of `base` replaces it completely, because the keys of `base` are arguments of another
            class. A `model` with `from` also replaces a `model` with `preset`, and a `model` with `preset` replaces a
            `model` with `from`. None: all mappings are merged.
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

"""Finds the names that a chat template uses, so that a request cannot set a name that has no effect."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import meta, nodes

from weft.data.conversations.messages import REASONING
from weft.data.conversations.template import ChatTemplate
from weft.data.conversations.template_environment import make_environment
from weft.serve.errors import ApiError

GIVEN = ("messages", "tools", "add_generation_prompt", "documents")  # variables that are not `chat_template_kwargs`
# Keys of OpenAI's messages, which clients send also if the template does not use them.
KNOWN_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "annotations", *REASONING)
LOOKUPS = ("get", "pop", "attr", "selectattr", "rejectattr", "map", "groupby", "sort")  # take a key as an argument
SELECTIONS = ("reverse", "list", "selectattr", "rejectattr", "first", "last")  # filters that return messages
DUMPS = ("tojson", "items", "dictsort", "string", "pprint")  # filters and methods that use all keys


@dataclass(frozen=True)
class TemplateNames:
    """The names that a chat template uses.

    Attributes:
        variables: variables, such as `enable_thinking`.
        keys: keys and attributes, of messages and of other objects. None: any, because complete messages are written.
    """

    variables: frozenset[str]
    keys: frozenset[str] | None


def check_names(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None,
    *,
    with_tools: bool,
) -> None:
    """Raises ApiError if messages have keys, or a request has variables, that a chat template does not use.

    Args:
        template: the chat template.
        messages: the messages, without keys whose values are null.
        variables: variables of the template, `chat_template_kwargs`.
        with_tools: whether the template is rendered with tools, for which it can have other source code.
    """
    source = template.source
    names = names_of(source.with_tools if with_tools and source.with_tools else source.source)
    for name in variables or ():
        if name in GIVEN or name not in names.variables:
            known = names.variables.difference(GIVEN)
            place = f"chat_template_kwargs.{name}"
            raise ApiError(400, "unknown_parameter", _unknown("variable", name, known), place)
    for index, message in enumerate(messages):
        for key in message:
            if key not in KNOWN_KEYS and names.keys is not None and key not in names.keys:
                place = f"messages.{index}.{key}"
                raise ApiError(400, "unknown_parameter", _unknown("key", key, names.keys.union(KNOWN_KEYS)), place)


def _unknown(kind: str, name: str, known: Collection[str]) -> str:
    remedy = f"use one of {', '.join(sorted(known))}" if known else "remove it"
    return f"the model's chat template does not use the {kind} {name!r}; {remedy}"


@lru_cache(maxsize=64)
def names_of(source: str) -> TemplateNames:
    """Returns the names that the source code of a chat template uses."""
    environment = make_environment(None)
    tree = environment.parse(source)
    first: dict[str, str] = {}  # name of a variable -> whether the template reads or sets it first
    for node in tree.find_all((nodes.Assign, nodes.Name)):
        names = node.node.find_all(nodes.Name) if isinstance(node, nodes.Assign) else []
        for name in [*names, node.node if isinstance(node, nodes.Assign) else node]:
            if isinstance(name, nodes.Name):
                first.setdefault(name.name, name.ctx)
    unset = meta.find_undeclared_variables(tree) - environment.globals.keys()
    variables = frozenset(name for name in unset if first.get(name) == "load")
    return TemplateNames(variables, None if _writes_messages(tree) else frozenset(_keys(tree)))


def _keys(tree: nodes.Node) -> Iterable[str]:
    """Yields the attributes and keys that a template reads: `a.key`, `a['key']`, `a.get('key')` and `'key' in a`."""
    others = {"loop", *(one.name for one in tree.find_all(nodes.NSRef))}  # objects of the template
    methods = {id(one.node) for one in tree.find_all(nodes.Call)}
    for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Call, nodes.Filter, nodes.Compare)):
        if isinstance(node, nodes.Getattr):
            if id(node) not in methods and not (isinstance(node.node, nodes.Name) and node.node.name in others):
                yield node.attr
        elif isinstance(node, nodes.Getitem):
            yield from _texts([node.arg])
        elif isinstance(node, nodes.Compare) and any(one.op in ("in", "notin") for one in node.ops):
            yield from filter(str.isidentifier, _texts([node.expr]))
        elif isinstance(node, nodes.Filter | nodes.Call) and _name(node) in LOOKUPS:
            yield from _texts([*node.args, *(one.value for one in node.kwargs)])


def _texts(given: Sequence[nodes.Node | None]) -> list[str]:
    return [node.value for node in given if isinstance(node, nodes.Const) and isinstance(node.value, str)]


def _name(node: nodes.Filter | nodes.Call) -> str | None:
    """Returns the name of a filter, or of the method that is called."""
    if isinstance(node, nodes.Filter):
        return node.name
    return node.node.attr if isinstance(node.node, nodes.Getattr) else None


def _writes_messages(tree: nodes.Node) -> bool:
    """Whether a template writes complete messages, such as `{{ message | tojson }}`, so that it uses all keys."""
    messages = {"messages"}  # and variables whose values are messages or lists of messages
    for node in tree.find_all((nodes.For, nodes.Assign)):
        value = node.iter if isinstance(node, nodes.For) else node.node
        if _variable(value) in messages and isinstance(node.target, nodes.Name):
            messages.add(node.target.name)
    node: Any
    for node in tree.find_all((nodes.Filter, nodes.Call, nodes.Output)):
        values = node.nodes if isinstance(node, nodes.Output) else []
        if not isinstance(node, nodes.Output) and _name(node) in DUMPS:
            values = [node.node if isinstance(node, nodes.Filter) else node.node.node]
        if any(_variable(value) in messages for value in values):
            return True
    return False


def _variable(node: nodes.Node | None) -> str | None:
    """Returns the name of the variable of which an expression is the value, an element or a slice."""
    while (isinstance(node, nodes.Getitem) and not _texts([node.arg])) or (
        isinstance(node, nodes.Filter) and node.name in SELECTIONS
    ):
        node = node.node
    return node.name if isinstance(node, nodes.Name) else None

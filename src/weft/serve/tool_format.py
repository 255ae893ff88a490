"""Finds the text in which a chat template writes tool calls, by rendering a message with calls."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.data.conversations.endings import SAMPLE
from weft.data.conversations.template import ChatTemplate
from weft.data.sources.values import Unfit

_NAMES = ("weft_tool_one", "weft_tool_two")
_ARGUMENTS = '{"weft_key": "weft_value"}'
# The beginning of a call that is a JSON object, and what is between its name and its arguments.
_OBJECT = re.compile(r'(?:^|(?<=\s))([^\s{}]*?)\s*\[?\s*\{\s*(?:"\w+":\s*"\w*",\s*)?"(\w+)":\s*"$')
_BETWEEN = re.compile(r'"\s*,\s*"(\w+)":\s*"?$')


@dataclass(frozen=True)
class ToolFormat:
    """The text that a chat template writes for tool calls.

    Attributes:
        before: text before the name of the first call, as the template writes it.
        between: text between the name and the arguments of a call.
        separator: text between the arguments of a call and the name of the next call; None: one call per message.
        after: text after the arguments of the last call, without the end of the message.
        marker: text with which calls begin; "": calls have no marker, and are the complete message.
        is_json: whether a call is a JSON object with the keys `name_key` and one of `argument_keys`.
        text_arguments: whether the template expects arguments as JSON text.
        id_length: number of characters that the template requires for the id of a call; None: any.
    """

    before: str
    between: str
    separator: str | None
    after: str
    marker: str
    is_json: bool
    name_key: str = "name"
    argument_keys: tuple[str, ...] = ()
    text_arguments: bool = False
    id_length: int | None = None

    @property
    def middle(self) -> str:
        """For calls that are no JSON objects: the text between the name and the arguments."""
        return self.between.strip()

    @property
    def next(self) -> str:
        """For calls that are no JSON objects: the text that introduces the next call."""
        return "" if self.is_json or self.separator is None else self.separator.strip()

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts that can follow the JSON text of a call."""
        after = self.after.lstrip("}] \t\r\n") if self.is_json else self.after
        return tuple(text for text in (self.next, after.strip()) if text)


def find_tool_format(template: ChatTemplate) -> ToolFormat | None:
    """Returns the format of tool calls of a chat template; None if it writes none, or not as JSON arguments."""
    for text_arguments in (False, True):
        for id_length in (None, 9):  # templates of Mistral require 9
            one, two = (_render(template, n, text_arguments, id_length) for n in (1, 2))
            if one is not None and (found := _read_format(one, two)) is not None:
                return ToolFormat(*found, text_arguments=text_arguments, id_length=id_length)
    return None


def _render(template: ChatTemplate, count: int, text_arguments: bool, id_length: int | None) -> str | None:
    """Returns what a template writes for an assistant message with `count` calls, or None if it cannot render it."""
    arguments = _ARGUMENTS if text_arguments else json.loads(_ARGUMENTS)
    question = [{"role": "user", "content": "weft"}]
    schema = {"type": "object", "properties": {"weft_key": {"type": "string"}}}
    tools: list[Any] = [
        {"type": "function", "function": {"name": name, "description": "weft", "parameters": schema}} for name in _NAMES
    ]
    calls = [
        {
            "id": "0" * (id_length - 1) + str(number) if id_length else f"call_{number:024}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for number, name in enumerate(_NAMES[:count])
    ]
    try:
        plain = template.render([*question, {"role": "assistant", "content": SAMPLE}], tools)[0]
        full = template.render([*question, {"role": "assistant", "content": "", "tool_calls": calls}], tools)[0]
    except Unfit:
        return None
    header, _, end = plain.rpartition(SAMPLE)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(header, full, strict=False))
    start = sum(1 for _ in same)
    return full[start:].rstrip().removesuffix(end.rstrip())


def _read_format(one: str, two: str | None) -> tuple | None:
    """Returns the first eight attributes of the `ToolFormat`, or None if the format is not known.

    Args:
        one, two: text of a message with one call and with two calls.
    """
    before, name, rest = one.partition(_NAMES[0])
    between, found, after = rest.partition(_ARGUMENTS)
    if not found:
        between, found, after = rest.partition(json.dumps(_ARGUMENTS)[1:-1])
    if not (name and found):
        return None
    head, keys = _OBJECT.search(before), _BETWEEN.search(between)
    separator = None
    if two is not None:
        second = two[len(before) + len(name) + len(between) + len(found) :]
        separator, seen, _ = second.partition(_NAMES[1])
        separator = separator if seen else None
    if head and keys:
        # Keys after the arguments, such as the id of the call, are omitted.
        after, separator = (text and re.sub(r'^("?)[^}]*', r"\1", text) for text in (after, separator))
        return before[head.start() :], between, separator, after, head[1], True, head[2], (keys[1],)
    marker = before.strip()
    if marker.startswith(("<", "[")) and between.strip() and not re.search(r"[\"{]", before + between):
        return before, between, separator, after, marker, False
    return None


def plain_arguments(messages: Iterable[Mapping[str, Any]], text_arguments: bool) -> list[dict[str, Any]]:
    """Returns messages whose tool calls have the kind of arguments that the template expects: objects or JSON text.

    Arguments that are not valid JSON stay text.
    """
    converted = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function = dict(call["function"])
            if not text_arguments:
                function["arguments"] = _object(function.get("arguments"))
            calls.append({**call, "function": function})
        converted.append({**message, "tool_calls": calls} if calls else dict(message))
    return converted


def _object(arguments: Any) -> Any:
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except ValueError:
        return arguments

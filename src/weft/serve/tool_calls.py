"""Reads tool calls from the text of a model while it is generated."""

from __future__ import annotations

import json
import re
import secrets
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from weft.serve.tool_format import ToolFormat

PYTHON_TAG = "<|python_tag|>"  # Llama 3.1 can write this token before a call
ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "id", "type", *ARGUMENTS)  # keys of a call
_BLANK = " \t\r\n"
_UNQUOTED = {*"{}[]:,+-.0123456789eE", *"true false null NaN Infinity", *_BLANK}  # characters of JSON outside of texts
_LONGEST_NAME = 256  # characters
_END = ""

Reader = Generator[None, str, str]


class Delta(NamedTuple):
    """A part of an assistant message.

    Attributes:
        content: text of the message.
        index: index of the tool call to which `id`, `name` and `arguments` belong; None: `content` is set.
        id: id of a new call.
        name: function of a new call.
        arguments: the next text of the call's arguments, a JSON object.
    """

    content: str = ""
    index: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class Call:
    """A tool call: its id, the name of the function, and its arguments as JSON text."""

    id: str
    name: str
    arguments: str = ""


class _NotACall(Exception):
    """The text that was read is not a tool call."""


class ToolCallParser:
    """Separates the tool calls of a message from its content. The text arrives in pieces.

    The name of a call is returned once it is complete, and its arguments as they arrive, in the model's own JSON text.
    Text that is not a call in the template's format is content. The same text in other pieces gives the same message.

    Args:
        format: the format of the chat template.
        names: names of the tools. A call of another name is a call if a marker introduces it, otherwise content.
    """

    def __init__(self, format: ToolFormat, names: Collection[str]):
        self._format, self._names = format, names
        self._deltas: list[Delta] = []
        self._queue: deque[str] = deque()
        self._raw: list[str] = []  # the text that becomes content if it is not a call
        self._open = False  # whether the call that is read was already returned
        self._space: list[str] = []  # white space at the end of the content, which is no content if a call follows
        self._ended, self._stop = False, ""  # while content is read, `_stop` is the character that can begin a call
        self.calls = 0
        self._reader = self._read()
        next(self._reader)

    def feed(self, text: str) -> list[Delta]:
        """Appends text. Returns the next parts of the message."""
        position = 0
        while self._queue or position < len(text):
            if self._queue:
                self._send(self._queue.popleft())
            elif self._stop and text[position] != self._stop:
                start, position = position, text.find(self._stop, position) % (len(text) + 1)  # -1: the end
                self._content(text[start:position])
            else:
                self._send(text[position])
                position += 1
        return self._take()

    def finish(self) -> list[Delta]:
        """Ends the text. Returns the last parts of the message. The arguments of the last call can be incomplete."""
        self._ended = True
        with suppress(StopIteration):
            while True:
                self._send(self._queue.popleft() if self._queue else _END)
        return self._take()

    def _send(self, character: str) -> None:
        self._raw.append(character)
        self._reader.send(character)

    def _take(self) -> list[Delta]:
        """Returns the new parts; joins adjacent parts of the content or of one call."""
        groups: list[list[Delta]] = []
        for delta in self._deltas:
            last = groups[-1][-1] if groups else None
            if last is not None and last.index == delta.index and last.id is delta.id is None:
                groups[-1].append(delta)
            else:
                groups.append([delta])
        self._deltas.clear()
        return [
            group[0]._replace(content="".join(d.content for d in group), arguments="".join(d.arguments for d in group))
            for group in groups
        ]

    # The methods below are coroutines that receive one character at a time, or _END. They return the first character
    # that they do not use.

    def _read(self) -> Generator[None, str, None]:
        marker = self._format.marker
        if not marker:
            try:
                character = yield from self._bare_call()
            except _NotACall:
                self._put_back_raw()
                character = yield
            marker = "\0"  # calls without a marker are only at the beginning of a text
        else:
            character = yield
        found = ""  # the beginning of a marker
        while character != _END or found:
            if character and marker.startswith(found + character):
                found += character
                if found == marker:
                    found = ""
                    yield from self._marked_calls()
            elif found:  # the marker can begin again within its beginning
                self._content(found[0])
                self._put_back(found[1:] + character)
                found = ""
            else:
                self._content(character)
                self._raw.clear()
            self._stop = "" if found else marker[0]
            character = yield
            self._stop = ""
        if not self.calls:
            self._flush()

    def _marked_calls(self) -> Generator[None, str, None]:
        space, self._space, calls = self._space, [], self.calls
        self._raw.clear()
        try:
            self._put_back((yield from self._calls((yield))))
        except _NotACall:
            if self.calls == calls:
                self._space = space
                self._content(self._format.marker)
            self._put_back_raw()

    def _put_back_raw(self) -> None:
        """Makes text content that is not a call. The end of an incomplete call whose arguments are known is dropped."""
        self._put_back("" if self._ended and self._open else "".join(self._raw))

    def _put_back(self, text: str) -> None:
        """Puts text back into the queue, to be read again."""
        self._queue.extendleft(reversed(text))
        self._raw.clear()

    def _content(self, text: str) -> None:
        words = text.rstrip(_BLANK)
        if words:
            self._flush()
            self._deltas.append(Delta(words))
        if len(words) < len(text):
            self._space.append(text[len(words) :])

    def _flush(self) -> None:
        if self._space:
            self._deltas.append(Delta("".join(self._space)))
        self._space.clear()

    def _bare_call(self) -> Reader:
        character = yield from self._blanks((yield))
        for expected in PYTHON_TAG if character == PYTHON_TAG[0] else "":
            if character != expected:
                raise _NotACall
            character = yield
        return (yield from self._calls((yield from self._blanks(character))))

    def _calls(self, character: str) -> Reader:
        """Reads one or several calls, and the text that closes them."""
        form = self._format
        character = yield from self._blanks(character)
        if form.is_json and character == "[":
            character = yield from self._blanks((yield))
        while True:
            self._open = False
            if form.is_json:
                character = yield from self._json_call(character)
            else:
                character = yield from self._named_call(character)
            self._raw = [character]
            character = yield from self._blanks(character)
            while form.is_json and character and character in ",;]":
                character = yield from self._blanks((yield))
                self._raw = [character]
            if form.is_json and character == "{":
                continue
            if character == _END:
                return _END
            text = character
            while text and text not in form.ends and any(end.startswith(text) for end in form.ends):
                character = yield
                if character == _END:
                    return _END
                text += character
            if text not in form.ends:
                raise _NotACall
            character = yield
            if text != form.next:
                return character

    def _blanks(self, character: str) -> Reader:
        while character and character in _BLANK:
            character = yield
        return character

    def _named_call(self, character: str) -> Reader:
        """Reads a call whose name is not part of a JSON object."""
        name, middle = "", self._format.middle
        while not name.endswith(middle):
            if character == _END or len(name) > _LONGEST_NAME:
                raise _NotACall
            name += character
            character = yield
        name, character = name.removesuffix(middle).strip(), (yield from self._blanks(character))
        if not re.fullmatch(r"[\w.-]+", name) or character != "{":
            raise _NotACall
        self._begin_call(name)
        return (yield from self._value(character, self._argument))

    def _json_call(self, character: str) -> Reader:
        """Reads a call that is a JSON object with a name and arguments."""
        if character != "{":
            raise _NotACall
        name, arguments = None, None
        character = yield from self._blanks((yield))
        while character == '"':
            parts: list[str] = []
            character = yield from self._value(character, parts.append)
            key, character = _loads(parts), (yield from self._blanks(character))
            if character != ":" or key not in (*_KEYS, self._format.name_key, *self._format.argument_keys):
                raise _NotACall
            character, parts = (yield from self._blanks((yield))), []
            is_arguments = key in ARGUMENTS or key in self._format.argument_keys
            if is_arguments and name is not None and character == "{" and not self._open:
                self._begin_call(name)
                character = yield from self._value(character, self._argument)
            else:
                character = yield from self._value(character, parts.append)
                if key in ("name", self._format.name_key):
                    name = self._checked(_loads(parts))
                elif is_arguments:
                    arguments = _object_text(_loads(parts), "".join(parts))
            character = yield from self._blanks(character)
            if character != ",":
                break
            character = yield from self._blanks((yield))
        if not self._open:
            if character != "}" or name is None or (arguments is None and not self._format.marker):
                raise _NotACall
            self._begin_call(name)
            self._argument(arguments or "{}")
        return (yield) if character == "}" else character

    def _checked(self, name: object) -> str:
        if not isinstance(name, str) or not name or (not self._format.marker and name not in self._names):
            raise _NotACall
        return name

    def _value(self, character: str, write: Callable[[str], object]) -> Reader:
        """Reads a JSON value."""
        depth, quoted, escaped = 0, False, False
        while character != _END:
            if not quoted and depth == 0 and character in ",:]}" + _BLANK:
                return character
            write(character)
            if quoted:
                quoted = escaped or character != '"'
                escaped = character == "\\" and not escaped
            elif character == '"':
                quoted = True
            elif not self._open and character not in _UNQUOTED:
                raise _NotACall  # now, so that no character is read more often than a few times
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
            else:
                character = yield
                continue
            ended, character = depth == 0 and not quoted, (yield)
            if ended:
                return character
        if self._open:
            return _END
        raise _NotACall

    def _begin_call(self, name: str) -> None:
        style = self._format.id_length
        id = secrets.token_hex(style)[:style] if style else f"call_{secrets.token_hex(12)}"
        self._deltas.append(Delta(index=self.calls, id=id, name=name))
        self.calls += 1
        self._open = True
        self._raw.clear()

    def _argument(self, text: str) -> None:
        self._deltas.append(Delta(index=self.calls - 1, arguments=text))
        self._raw.clear()


def _loads(parts: Sequence[str]) -> object:
    try:
        return json.loads("".join(parts))
    except ValueError:
        raise _NotACall from None


def _object_text(value: object, text: str) -> str:
    """Returns arguments as JSON text: an object, or JSON text within a string."""
    return value if isinstance(value, str) else text


def join_deltas(deltas: Sequence[Delta]) -> tuple[str, list[Call]]:
    """Returns the content and the tool calls of a message."""
    content, calls = "", list[Call]()
    for delta in deltas:
        content += delta.content
        if delta.id is not None:
            calls.append(Call(delta.id, delta.name or ""))
        if delta.index is not None:
            calls[delta.index].arguments += delta.arguments
    return content, calls

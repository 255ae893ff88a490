"""A tokenizer's chat template: messages to text, with the places that the assistant wrote.

Rendered as Hugging Face defines it: jinja2 in its sandbox, blocks trimmed, the helpers `raise_exception`, `tojson`
and `strftime_now`, `break` and `continue`, and `{% generation %}...{% endgeneration %}` around the assistant's words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.data.conversations.messages import REASONING
from weft.data.conversations.named_templates import NAMED
from weft.data.sources.values import Unfit
from weft.errors import UserError
from weft.files import read_json

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# What a template written for other data raises on a record: its own words are all that can be told of it.
FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class TemplateText:
    """A template's source before it is compiled, so that it can be sent to other processes.

    Attributes:
        origin: where it is from, to be shown.
        with_tools: another source, for conversations that come with tools.
        markers: the special tokens that a format chosen by name writes.
        tokens: the names of those (`bos_token`) that it writes if the tokenizer has them.
    """

    origin: str
    source: str
    with_tools: str | None = None
    markers: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()

    @property
    def marked(self) -> bool:
        """Whether it marks what the assistant wrote."""
        return all(MARK.search(source) for source in (self.source, self.with_tools) if source is not None)

    @property
    def tells_time(self) -> bool:
        """Whether it may write today's date."""
        return any("strftime_now" in source for source in (self.source, self.with_tools) if source is not None)


def find_template(folder: Path, stated: str | None = None) -> TemplateText:
    """The template of a tokenizer's folder, or the one stated.

    Args:
        stated: a format by name (`chatml`, ...), a file, or the name of one of the folder's several templates.

    Raises:
        UserError: there is none, it cannot be read, or it is no template.
    """
    if stated in NAMED:
        named = NAMED[stated]
        text = TemplateText(f"the format {stated}", named.source, markers=named.markers, tokens=named.tokens)
    elif stated is not None and Path(stated).is_file():
        text = TemplateText(stated, _read(Path(stated)))
    else:
        text = _of_folder(folder, stated)
    for source in (text.source, text.with_tools):
        mistake = None if source is None else _mistake(source)
        if mistake is not None:
            what = f"not a chat template: {mistake.message}; mend it, or state another by --chat-template"
            raise UserError(what, text.origin, mistake.lineno)
    return text


def template_doubts(folder: Path) -> list[str]:
    """What is wrong with the chat templates of a tokenizer's folder, in words; none if it has none.

    Raises:
        UserError: a file cannot be read.
    """
    named, origin = _in_folder(folder)
    doubts = []
    for name, source in named.items():
        mistake = _mistake(source)
        if mistake is not None:
            which = "the chat template" if name == "default" else f"the chat template {name!r}"
            doubts.append(f"{which} ({origin.name}) is none: line {mistake.lineno}: {mistake.message}; mend it")
    for name in () if named else ("tokenizer_config.json", "chat_template.json"):
        found = read_json(folder / name) if (folder / name).is_file() else None
        if isinstance(found, dict) and found.get("chat_template") is not None:
            doubts.append(f"chat_template in {name} is neither a text nor a list of named ones, so there is none")
    return doubts


def _mistake(source: str) -> jinja2.TemplateSyntaxError | None:
    try:
        _environment(None).from_string(source)
    except jinja2.TemplateSyntaxError as error:
        return error
    return None


def _in_folder(folder: Path) -> tuple[dict[str, str], Path]:
    """The templates of a tokenizer's folder by their names, and where they are."""
    named: dict[str, str] = {}
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if (folder / "chat_template.jinja").is_file():
        named["default"] = _read(folder / "chat_template.jinja")
    named |= {file.stem: _read(file) for file in files}
    origin = folder / ("chat_template.jinja" if "default" in named else "additional_chat_templates")
    for file in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        if not named and file.is_file():
            found = read_json(file)
            found = found.get("chat_template") if isinstance(found, dict) else None
            if isinstance(found, str):
                named, origin = {"default": found}, file
            elif isinstance(found, list) and all(
                isinstance(one, dict) and {"name", "template"} <= {*one} for one in found
            ):
                named, origin = {one["name"]: one["template"] for one in found}, file
    return named, origin


def _of_folder(folder: Path, stated: str | None) -> TemplateText:
    named, origin = _in_folder(folder)
    if stated is not None:
        if stated in named:
            return TemplateText(f"{origin} ({stated})", named[stated])
        also = f", and in {folder}: {', '.join(named)}" if len(named) > 1 else ""
        raise UserError(f"--chat-template {stated}: no such file, nor one of {', '.join(NAMED)}{also}")
    if "default" in named:
        return TemplateText(str(origin), named["default"], named.get("tool_use"))
    if named:
        raise UserError(f"several chat templates and no default; state one: --chat-template {'|'.join(named)}", origin)
    raise UserError(
        f"no chat template in this folder; state one: --chat-template FILE, or a format by name ({', '.join(NAMED)})",
        folder,
    )


def _read(file: Path) -> str:
    if file.suffix == ".json":
        found = read_json(file)
        if not isinstance(found, dict) or not isinstance(found.get("chat_template"), str):
            raise UserError('not a chat template: no "chat_template" in it', file)
        return found["chat_template"]
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", file) from None
    except UnicodeDecodeError:
        raise UserError("not UTF-8; a chat template is a text file", file) from None


def special_tokens(folder: Path) -> dict[str, str]:
    """The tokens that templates know by name (`bos_token`, `eos_token`, ...), as the tokenizer's folder states them."""
    tokens: dict[str, str] = {}
    for file in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        stated = read_json(file) if file.is_file() else {}
        if not isinstance(stated, dict):
            continue
        extra = stated.get("extra_special_tokens")
        for key, value in [*stated.items(), *(extra.items() if isinstance(extra, dict) else [])]:
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str) and (key.endswith("_token") or (isinstance(extra, dict) and key in extra)):
                tokens[key] = value
    return tokens


class ChatTemplate:
    """A compiled template.

    Args:
        variables: what it knows beside the messages, the special tokens among it.
        now: the time that it is told when it asks; None: the present.

    Attributes:
        takes_parts: whether it renders content given as a list of text parts as it does text.
    """

    def __init__(self, text: TemplateText, variables: Mapping[str, Any], now: datetime | None = None):
        self.text, self._variables = text, dict(variables)
        self._environment = _environment(now)
        self._plain = self._environment.from_string(text.source)
        self._with_tools = self._environment.from_string(text.with_tools) if text.with_tools else self._plain
        self.takes_parts = self._renders_parts()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        prompt: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the characters in it that the template marks as the assistant's: [start, end) of each block.

        Args:
            prompt: add the beginning of an assistant's turn (`add_generation_prompt`).

        Raises:
            Unfit: the template refuses the messages.
        """
        template = self._plain if tools is None else self._with_tools
        marks = self._environment.marks  # pyright: ignore[reportAttributeAccessIssue]
        marks.begin()
        pieces = []
        try:
            for piece in template.generate(
                **{
                    "documents": None,
                    **self._variables,
                    **(variables or {}),
                    "messages": [_with_reasoning(message) for message in messages],
                    "tools": tools,
                    "add_generation_prompt": prompt,
                }
            ):
                pieces.append(piece)
                marks.written += len(piece)
        except FAILURES as error:
            name = re.fullmatch(r"'(\w+_token)' is undefined", str(error))
            if name is not None:
                raise Unfit(
                    f"the chat template uses {name[1]}, which the tokenizer does not name; state it in "
                    "tokenizer_config.json"
                ) from None
            told = " ".join(str(getattr(error, "message", None) or error).split())[:200]
            kind = "" if type(error) is jinja2.TemplateError else f"{type(error).__name__}: "
            raise Unfit(f"the chat template refuses it: {kind}{told}") from None
        return "".join(pieces), marks.spans

    def _renders_parts(self) -> bool:
        try:
            both = [
                self.render([{"role": "user", "content": content}])[0]
                for content in ("a weft", [{"type": "text", "text": "a weft"}])
            ]
        except Unfit:
            return False
        return both[0] == both[1]


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reasoning goes by three names; templates read the first, some the second."""
    said = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if said is None else {"thinking": said, **message, "reasoning_content": said}


class _Marks(Extension):
    """The block `{% generation %}`: notes where in the text its content stands, and writes it."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's way)

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        environment.extend(marks=self)
        self.begin()

    def begin(self) -> None:
        """A new text."""
        self.written, self.spans = 0, []

    def parse(self, parser: Any) -> nodes.Node:
        """The block as a call of `_mark` with its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        content = caller()
        self.spans.append((self.written, self.written + len(content)))
        return content


class _Namespace(jinja2.utils.Namespace):
    """A template's `namespace()` without attributes that begin with an underscore, a way out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any):  # `self` may be a template's own name
        values = dict(*args[1:], **kwargs)
        for name in values:
            _public(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, value)


def _public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace's attribute may not begin with an underscore: {name}")


def _environment(now: datetime | None) -> ImmutableSandboxedEnvironment:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # jinja2's own filter escapes what HTML would need.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: (now or datetime.now()).strftime(form)
    environment.globals["namespace"] = _Namespace
    return environment

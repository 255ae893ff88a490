"""Renders messages with a tokenizer's chat template, and returns the spans of the assistant's text.

Templates work as in Hugging Face Transformers: jinja2 in a sandbox, with trimmed blocks, the functions
`raise_exception`, `tojson` and `strftime_now`, the statements `break` and `continue`, and
`{% generation %}...{% endgeneration %}` around the assistant's text.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from weft.data.conversations.messages import REASONING
from weft.data.conversations.named_templates import NAMED
from weft.data.conversations.template_environment import make_environment
from weft.data.option_names import COMMAND, OptionNames
from weft.data.sources.values import Unfit
from weft.errors import UserError
from weft.files import read_json

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Exceptions that a template raises if it cannot render a record. The message becomes the reason of rejection.
FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class TemplateSource:
    """The source of a chat template, which can be pickled, unlike a compiled template.

    Attributes:
        origin: file or name of the template, for messages.
        source: Jinja source code of the template.
        with_tools: source code for conversations with tools, if this is separate.
        markers: for a built-in template, the special tokens in its source code.
        tokens: for a built-in template, the special-token variables that it uses, such as `bos_token`.
    """

    origin: str
    source: str
    with_tools: str | None = None
    markers: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()

    @property
    def marked(self) -> bool:
        """Whether the template marks the assistant's text."""
        return all(MARK.search(source) for source in (self.source, self.with_tools) if source is not None)

    @property
    def uses_date(self) -> bool:
        """Whether the template can write the current date."""
        return any("strftime_now" in source for source in (self.source, self.with_tools) if source is not None)


def find_template(folder: Path, name: str | None = None, words: OptionNames = COMMAND) -> TemplateSource:
    """Returns the chat template in a tokenizer's folder, or the template `name`.

    Args:
        name: the name of a built-in template such as `chatml`, a file, or the name of a template in the folder; None:
            the folder's default template.
        words: names of options in messages.

    Raises:
        UserError: the template does not exist, cannot be read, or has invalid syntax.
    """
    if name in NAMED:
        named = NAMED[name]
        template = TemplateSource(
            f"the built-in template {name}", named.source, markers=named.markers, tokens=named.tokens
        )
    elif name is not None and Path(name).is_file():
        template = TemplateSource(name, _read(Path(name)))
    else:
        template = _find_in_folder(folder, name, words.name("chat_template"))
    for source in (template.source, template.with_tools):
        error = None if source is None else _syntax_error(source)
        if error is not None:
            remedy = f"fix it, or choose another with {words.name('chat_template')}"
            raise UserError(f"not a valid chat template: {error.message}; {remedy}", template.origin, error.lineno)
    return template


def has_template(folder: Path) -> bool:
    """Whether a folder contains a chat template."""
    return bool(_read_folder(folder)[0])


def template_folder(adapter: str | Path | None, tokenizer: Path) -> Path:
    """Returns the folder with the chat template of a model: that of its adapter if it has one, otherwise `tokenizer`.

    Args:
        adapter: a PEFT folder, a run with an adapter, or None.
        tokenizer: folder of the model's tokenizer.
    """
    own = () if adapter is None else (Path(adapter), Path(adapter) / "tokenizer")
    return next(filter(has_template, own), tokenizer)


def template_problems(folder: Path) -> list[str]:
    """Returns descriptions of the problems of the chat templates in a folder.

    Raises:
        UserError: a file cannot be read.
    """
    named, origin = _read_folder(folder)
    problems = []
    for name, source in named.items():
        error = _syntax_error(source)
        if error is not None:
            which = "the chat template" if name == "default" else f"the chat template {name!r}"
            problems.append(f"{which} ({origin.name}) is invalid: line {error.lineno}: {error.message}; fix it")
    for name in () if named else ("tokenizer_config.json", "chat_template.json"):
        found = read_json(folder / name) if (folder / name).is_file() else None
        if isinstance(found, dict) and found.get("chat_template") is not None:
            problems.append(
                f"chat_template in {name} is neither a text nor a list of named templates; it is ignored; fix it"
            )
    return problems


def _syntax_error(source: str) -> jinja2.TemplateSyntaxError | None:
    try:
        make_environment(None).from_string(source)
    except jinja2.TemplateSyntaxError as error:
        return error
    return None


def _read_folder(folder: Path) -> tuple[dict[str, str], Path]:
    """Returns the templates in a tokenizer's folder by name, and the file or folder that contains them."""
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


def _find_in_folder(folder: Path, name: str | None, option: str) -> TemplateSource:
    named, origin = _read_folder(folder)
    if name is not None:
        if name in named:
            return TemplateSource(f"{origin} ({name})", named[name])
        also = f", or a template in {folder}: {', '.join(named)}" if len(named) > 1 else ""
        raise UserError(f"{option} {name}: not found; use a file, or one of {', '.join(NAMED)}{also}")
    if "default" in named:
        return TemplateSource(str(origin), named["default"], named.get("tool_use"))
    if named:
        raise UserError(f"several chat templates, but no default; set {option} to one of {', '.join(named)}", origin)
    raise UserError(
        f"no chat template in this folder; set {option} to a file or a built-in template ({', '.join(NAMED)})",
        folder,
    )


def _read(file: Path) -> str:
    if file.suffix == ".json":
        found = read_json(file)
        if not isinstance(found, dict) or not isinstance(found.get("chat_template"), str):
            raise UserError('not a chat template: it has no key "chat_template"; check the path', file)
        return found["chat_template"]
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}; check the file and its permissions", file) from None
    except UnicodeDecodeError:
        raise UserError("not UTF-8 text; a chat template must be a UTF-8 file", file) from None


def special_tokens(folder: Path) -> dict[str, str]:
    """Returns the special tokens of the tokenizer in a folder: name, such as `eos_token`, -> text of the token."""
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
    """A compiled chat template.

    Args:
        source: source of the template.
        variables: variables of the template besides the messages, including special tokens.
        now: time for `strftime_now`; default: the current time.

    Attributes:
        takes_parts: whether the template renders a list of text parts in the same way as the joined text.
        undefined: special-token variables that the template uses and the tokenizer does not define.
    """

    def __init__(self, source: TemplateSource, variables: Mapping[str, Any], now: datetime | None = None):
        self.source, self._variables, self.undefined = source, dict(variables), list[str]()
        self._environment = make_environment(now)
        self._plain = self._environment.from_string(source.source)
        self._with_tools = self._environment.from_string(source.with_tools) if source.with_tools else self._plain
        self.takes_parts = self._renders_parts()

    @classmethod
    def for_tokenizer(
        cls,
        source: TemplateSource,
        folder: Path,
        variables: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> ChatTemplate:
        """Compiles a template with the special tokens of the tokenizer in `folder`.

        Special tokens that a built-in template uses, but the tokenizer does not define, are omitted (`undefined`).

        Args:
            variables, now: as in `ChatTemplate`.
        """
        defined = {**special_tokens(folder), **(variables or {})}
        undefined = [name for name in source.tokens if name not in defined]
        template = cls(source, {**dict.fromkeys(undefined, ""), **defined}, now)
        template.undefined = undefined
        return template

    def warnings(self, added: Container[str], words: OptionNames = COMMAND) -> list[str]:
        """Returns warnings about a tokenizer that lacks tokens of a built-in template, one line each.

        Args:
            added: the added tokens of the tokenizer.
            words: names of options in the warnings.
        """
        lines, origin = [], self.source.origin
        if split := [marker for marker in self.source.markers if marker not in added]:
            lines.append(
                f"{', '.join(split)}: not in this tokenizer's vocabulary, so each becomes several tokens; add them to "
                f"the tokenizer, or replace {origin} with another {words.name('chat_template')}"
            )
        if self.undefined:
            lines.append(
                f"{', '.join(self.undefined)}: not defined by this tokenizer, so {origin} omits it; "
                "define it in tokenizer_config.json"
            )
        return lines

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        prompt: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Renders messages. Returns the text, and the character spans [start, end) of its generation blocks.

        Args:
            tools: JSON schemas of tools.
            variables: further variables of the template, for this text only.
            prompt: whether to append the beginning of an assistant message (`add_generation_prompt`).

        Raises:
            Unfit: the template raises an error.
        """
        template = self._plain if tools is None else self._with_tools
        marks = self._environment.marks  # pyright: ignore[reportAttributeAccessIssue]
        marks.begin()
        chunks = []
        try:
            for chunk in template.generate(
                **{
                    "documents": None,
                    **self._variables,
                    **(variables or {}),
                    "messages": [_with_reasoning(message) for message in messages],
                    "tools": tools,
                    "add_generation_prompt": prompt,
                }
            ):
                chunks.append(chunk)
                marks.written += len(chunk)
        except FAILURES as error:
            token = re.fullmatch(r"'(\w+_token)' is undefined", str(error))
            if token is not None:
                raise Unfit(
                    f"the chat template uses {token[1]}, which the tokenizer does not define; add it to "
                    "tokenizer_config.json"
                ) from None
            message = " ".join(str(getattr(error, "message", None) or error).split())[:200]
            kind = "" if type(error) is jinja2.TemplateError else f"{type(error).__name__}: "
            raise Unfit(f"the chat template cannot render the messages: {kind}{message}") from None
        return "".join(chunks), marks.spans

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
    """Returns the message with its reasoning under both keys that templates use: thinking and reasoning_content."""
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}

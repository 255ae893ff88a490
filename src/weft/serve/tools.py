"""Converts the tools of a request and the format of its answer to a prompt's tools and constraints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from weft.data.conversations.template import ChatTemplate
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError
from weft.generation.constraints import compile_constraint, load_llguidance
from weft.serve.errors import ApiError
from weft.serve.schemas import NamedTool, ResponseFormat, Tool
from weft.serve.tool_calls import ToolCallParser
from weft.serve.tool_format import ToolFormat, find_tool_format, plain_arguments
from weft.serve.tool_grammar import tool_grammar

ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class ToolUse:
    """The tools that a model can call in an answer.

    Attributes:
        tools: the tools, for the chat template.
        format: the template's format of calls.
        grammar: grammar that the answer must follow, or None.
        visible: whether special tokens must be part of the text, because calls are written with special tokens.
    """

    tools: list[dict[str, Any]]
    format: ToolFormat
    grammar: str | None
    visible: bool

    def parser(self) -> ToolCallParser:
        return ToolCallParser(self.format, {tool["function"]["name"] for tool in self.tools})


def prepare_tools(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    tools: Sequence[Tool],
    choice: str | NamedTool | None,
    *,
    several: bool,
    schema: Any = None,
) -> ToolUse | None:
    """Checks the tools of a request. Returns None if the model must not call them.

    Args:
        template: the model's chat template.
        tokenizer: the model's tokenizer.
        tools: the tools.
        choice: "none", "auto", "required", a tool that must be called, or None: "auto" if there are tools.
        several: whether an answer can have several calls.
        schema: JSON schema of answers without calls, or None.

    Raises:
        ApiError: the template writes no tools, the choice is not among the tools, or it cannot be enforced.
    """
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if not tools and (named is not None or choice == "required"):
        raise ApiError(400, "invalid_value", "tool_choice needs tools; give at least one tool", "tool_choice")
    names = [tool.function.name for tool in tools]
    if named is not None and named not in names:
        what = f"tool_choice names the tool {named!r}, which is not one of the tools: {', '.join(names)}"
        raise ApiError(400, "invalid_value", f"{what}; name one of them", "tool_choice")
    if len(set(names)) < len(names):
        raise ApiError(400, "invalid_value", "two tools have the same name; give each another name", "tools")
    if not tools or choice == "none":
        return None
    found = tool_format(template)
    if found is None:
        what = "the model's chat template writes no tool calls in a known format (JSON arguments after a marker)"
        raise ApiError(400, "unsupported_tools", f"{what}; send no tools, or use another model", "tools")
    special = (token for token, id in tokenizer.added_tokens.items() if id in tokenizer.special_ids)
    written = found.before + found.between + (found.separator or "") + found.after
    grammar = None
    if named is not None or choice == "required" or schema is not None:
        need_constraints("tool_choice")
        schemas = {
            tool.function.name: {**ANY_OBJECT, **(tool.function.parameters or {})}
            for tool in tools
            if named in (None, tool.function.name)
        }
        otherwise = schema if named is None and choice != "required" else None
        try:
            grammar = tool_grammar(found, schemas, tokenizer, several=several and named is None, content=otherwise)
        except UserError as error:
            raise ApiError(400, "invalid_json_schema", error.what, "tools") from None
    shown = [tool.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]
    return ToolUse(shown, found, grammar, any(token in written for token in special))


@lru_cache(maxsize=32)
def tool_format(template: ChatTemplate) -> ToolFormat | None:
    """Returns the format of calls of a template, or None. See `find_tool_format`."""
    return find_tool_format(template)


def plain_calls(messages: Sequence[dict[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """Returns messages with calls as the template expects them."""
    if not any(message.get("tool_calls") for message in messages):
        return list(messages)
    found = tool_format(template)
    return plain_arguments(messages, found is not None and found.text_arguments)


def schema_of(form: ResponseFormat | None, param: str) -> Any:
    """Returns the JSON schema that an answer must follow, or None.

    Args:
        form: the format that the request asks for, or None.
        param: key of the request, for messages.

    Raises:
        ApiError: the schema is invalid or cannot be enforced, or constraints are not installed.
    """
    schema = None if form is None else form.wanted_schema
    if schema is None:
        return None
    need_constraints(param)
    try:
        compile_constraint(json_schema=schema)
    except UserError as error:
        raise ApiError(400, "invalid_json_schema", error.what, param) from None
    return schema


def need_constraints(param: str) -> None:
    """Raises ApiError if llguidance is not installed."""
    try:
        load_llguidance()
    except UserError as error:
        raise ApiError(501, "constraints_not_installed", error.what, param) from None

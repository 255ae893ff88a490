"""Writes the grammar of messages that call tools, for `Sampling.grammar`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError
from weft.generation.constraints import json_rule
from weft.serve.tool_format import ToolFormat


def tool_grammar(
    format: ToolFormat, tools: Mapping[str, Any], tokenizer: Tokenizer, *, several: bool, content: Any = None
) -> str:
    """Returns a Lark grammar for messages that consist of calls, as the chat template writes them.

    Args:
        format: the format of the chat template.
        tools: name of a tool -> JSON schema of its arguments.
        tokenizer: the model's tokenizer. Special tokens in the format must be these tokens.
        several: whether a message can have several calls, if the template can write them.
        content: JSON schema of messages without calls; None: all messages have calls.

    Raises:
        UserError: a schema cannot be enforced.
    """
    if format.is_json and format.between.endswith('"'):
        raise UserError("the chat template writes arguments as a JSON string, which cannot be enforced; use auto")
    calls, between = [], _expression(format.between, tokenizer)
    for number, (name, schema) in enumerate(tools.items()):
        try:
            rule = json_rule(schema)
        except UserError as error:
            what = error.what.removeprefix("json_schema: ")
            raise UserError(f"the parameters of the tool {name!r} cannot be enforced: {what}") from None
        calls.append(f"call_{number}: {json.dumps(name)} {between} {rule}")
    more = ""
    if several and format.separator is not None:
        more = f"({_expression(format.separator, tokenizer)} call)*"
    with_calls = (
        f"with_calls: {_expression(format.before, tokenizer)} call {more} {_expression(format.after, tokenizer)}"
    )
    choices = " | ".join(f"call_{number}" for number in range(len(calls)))
    lines = ["start: with_calls", with_calls, f"call: {choices}", *calls]
    if content is not None:
        lines[0] = f"start: with_calls | content\ncontent: {json_rule(content)}"
    return "\n".join(lines)


def _expression(text: str, tokenizer: Tokenizer) -> str:
    """Returns an expression for a text. llguidance accepts special tokens only by their ids, not as text."""
    special = {token: id for token, id in tokenizer.added_tokens.items() if id in tokenizer.special_ids}
    parts: Sequence[str] = [text]
    if special:
        parts = re.split("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")", text)
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)

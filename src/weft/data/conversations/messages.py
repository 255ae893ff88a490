"""Converts messages of different formats to the format that chat templates expect.

A converted message is `{"role": "user", "content": "..."}`, and keeps other keys of the original message, such as
`tool_calls`, `name` and `reasoning_content`. Invalid messages raise `Unfit`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson

from weft.data.sources.values import Unfit

Record = Mapping[str, Any]

# Role in a record -> role in templates.
ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool", "function", "ipython")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response", "tool_result"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}
LARGEST = 3.4e38  # float32
REASONING = ("reasoning_content", "thinking", "reasoning")


def text_or_messages(value: Any, role: str, key: str) -> list[dict]:
    """Converts the value at a record's `key` to a list of messages.

    Args:
        value: a text, which becomes one message of `role`; or a message or list of messages with the keys role and
            content, or from and value.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = [value] if isinstance(value, dict) else value
    first = messages[0] if isinstance(messages, list) and messages and isinstance(messages[0], dict) else {}
    names = ("from", "value") if "from" in first and "role" not in first else ("role", "content")
    return convert_messages(messages, key, *names)


def convert_messages(messages: Any, key: str, role_key: str, content_key: str) -> list[dict]:
    """Converts the list of messages at a record's `key`.

    Args:
        role_key, content_key: keys of the role and the content in each message.
    """
    if not isinstance(messages, list):
        raise Unfit(f"field {key!r} is not a list of messages")
    if not messages:
        raise Unfit("no messages")
    return [_convert_message(message, role_key, content_key) for message in messages]


def _convert_message(original: Any, role_key: str, content_key: str) -> dict[str, Any]:
    if not isinstance(original, dict):
        raise Unfit("a message is not an object")
    stated = original.get(role_key)
    if stated is None:
        raise Unfit(f"a message without {role_key!r}")
    role = ROLES.get(stated) if isinstance(stated, str) else None
    if role is None:
        raise Unfit("unknown role", f"{stated!r}"[:60])
    # Drops nulls, as Transformers does: templates handle a missing key better than a null.
    message = {"role": role} | {
        ("content" if key == content_key else key): value
        for key, value in original.items()
        if value is not None and key != role_key
    }
    if role == "function_call":
        return _convert_call(message)
    content = message.get("content")
    if isinstance(content, str):
        return message
    if content is None:
        if role == "assistant" and any(message.get(key) for key in ("tool_calls", "function_call", *REASONING)):
            return message
        raise Unfit(f"a message whose {content_key!r} is " + ("null" if content_key in original else "missing"))
    if not isinstance(content, list):
        raise Unfit(f"a message whose {content_key!r} is neither text nor a list of parts")
    parts = []
    for part in content:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        elif not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Unfit("a message with a part that is not text", str(part)[:60])
        parts.append(part)
    return message | {"content": parts}


def _convert_call(message: dict[str, Any]) -> dict[str, Any]:
    """Converts a ShareGPT message that contains function calls (JSON text) to a message with OpenAI's `tool_calls`."""
    calls = parse_json(message.get("content"), "a function call that is not JSON")
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise Unfit("a function call without a name")
    functions = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    calls = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": calls} | rest


def required(record: Record, key: str) -> Any:
    """Returns the value at `key`. Raises `Unfit` if the key is missing or the value is null."""
    if key not in record:
        raise Unfit(f"no field {key!r}")
    if record[key] is None:
        raise Unfit(f"field {key!r} is null")
    return record[key]


def text_of(record: Record, key: str) -> str:
    """Returns the text at `key`. Raises `Unfit` if the key is missing or the value is not text."""
    value = required(record, key)
    if not isinstance(value, str):
        raise Unfit(f"field {key!r} is not text")
    return value


def parse_json(text: Any, reason: str) -> Any:
    """Parses JSON. Raises `Unfit` with `reason` if the text is not valid JSON."""
    try:
        return orjson.loads(text)
    except (orjson.JSONDecodeError, TypeError):
        raise Unfit(reason, str(text)[:60]) from None


def join_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Joins the text parts of a message's content to one text, for templates that do not support parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": "".join(part["text"] for part in content)}


def number_of(record: Record, key: str) -> float:
    """Returns the number at `key`, which can be text; 1 and 0 for true and false.

    Raises:
        Unfit: the key is missing, or the value is no finite number of 32 bits.
    """
    value = required(record, key)
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) < LARGEST:
        raise Unfit(f"field {key!r} is not a number", f"{str(value)[:20]!r}: must be a number, true or false")
    return number

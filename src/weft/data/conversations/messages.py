"""Converts messages of different formats to those that chat templates expect.

A message is `{"role": "user", "content": "..."}` with its other keys (`tool_calls`, `name`, `reasoning_content`, ...).
Invalid messages raise `Unfit`.
"""

from __future__ import annotations

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
REASONING = ("reasoning_content", "thinking", "reasoning")


def text_or_messages(value: Any, role: str, key: str) -> list[dict]:
    """Converts a text to a message of `role`; converts a message, or a list of messages, of either format."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = [value] if isinstance(value, dict) else value
    first = messages[0] if isinstance(messages, list) and messages and isinstance(messages[0], dict) else {}
    names = ("from", "value") if "from" in first and "role" not in first else ("role", "content")
    return convert_messages(messages, key, *names)


def convert_messages(messages: Any, key: str, role_key: str, content_key: str) -> list[dict]:
    """Converts the list of messages at a record's `key`."""
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
    """Converts ShareGPT's function call (JSON text) to OpenAI's `tool_calls`."""
    calls = parse_json(message.get("content"), "a function call that is not JSON")
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise Unfit("a function call without a name")
    functions = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    calls = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": calls} | rest


def required(record: Record, key: str) -> Any:
    """Returns the value at a required key."""
    if key not in record:
        raise Unfit(f"no field {key!r}")
    if record[key] is None:
        raise Unfit(f"field {key!r} is null")
    return record[key]


def text_of(record: Record, key: str) -> str:
    """Returns the text at a required key."""
    value = required(record, key)
    if not isinstance(value, str):
        raise Unfit(f"field {key!r} is not text")
    return value


def parse_json(text: Any, reason: str) -> Any:
    """Parses JSON; raises `Unfit` with `reason` if it is invalid."""
    try:
        return orjson.loads(text)
    except (orjson.JSONDecodeError, TypeError):
        raise Unfit(reason, str(text)[:60]) from None

"""Turns of conversations, by all the ways to write them, as the messages that chat templates expect.

A message is `{"role": "user", "content": "..."}`, with whatever else it came with (`tool_calls`, `name`,
`reasoning_content`, ...). What is none raises `Unfit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from weft.data.sources.values import Unfit

Record = Mapping[str, Any]

# Who speaks, by all the names that are about -> the name that templates know.
ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool", "function", "ipython")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response", "tool_result"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}
REASONING = ("reasoning_content", "thinking", "reasoning")


def said(value: Any, role: str, key: str) -> list[dict]:
    """Text as a message of `role`; a message or a list of them, of either way to write them, as messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    turns = [value] if isinstance(value, dict) else value
    first = turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], dict) else {}
    names = ("from", "value") if "from" in first and "role" not in first else ("role", "content")
    return turns_of(turns, key, *names)


def turns_of(turns: Any, key: str, role_key: str, content_key: str) -> list[dict]:
    """Turns as messages."""
    if not isinstance(turns, list):
        raise Unfit(f"field {key!r} is not a list of messages")
    if not turns:
        raise Unfit("no messages")
    return [_message(turn, role_key, content_key) for turn in turns]


def _message(turn: Any, role_key: str, content_key: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise Unfit("a message is not an object")
    said = turn.get(role_key)
    if said is None:
        raise Unfit(f"a message without {role_key!r}")
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise Unfit("unknown role", f"{said!r}"[:60])
    # Nulls are left out, as transformers does: templates take a missing key better than a null.
    message = {"role": role} | {
        ("content" if key == content_key else key): value
        for key, value in turn.items()
        if value is not None and key != role_key
    }
    if role == "function_call":
        return _call(message)
    content = message.get("content")
    if isinstance(content, str):
        return message
    if content is None:
        if role == "assistant" and any(message.get(key) for key in ("tool_calls", "function_call", *REASONING)):
            return message
        raise Unfit(f"a message whose {content_key!r} is " + ("null" if content_key in turn else "missing"))
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


def _call(message: dict[str, Any]) -> dict[str, Any]:
    """ShareGPT's function call, JSON in a text, as OpenAI's `tool_calls`."""
    calls = parsed(message.get("content"), "a function call that is not JSON")
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise Unfit("a function call without a name")
    functions = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    calls = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": calls} | rest


def needed(record: Record, key: str) -> Any:
    """What is at a key, which must be there."""
    if key not in record:
        raise Unfit(f"no field {key!r}")
    if record[key] is None:
        raise Unfit(f"field {key!r} is null")
    return record[key]


def text_of(record: Record, key: str) -> str:
    """The text at a key."""
    value = needed(record, key)
    if not isinstance(value, str):
        raise Unfit(f"field {key!r} is not text")
    return value


def parsed(text: Any, reason: str) -> Any:
    """JSON in a text; `reason`: why the record is refused where it is none."""
    try:
        return orjson.loads(text)
    except (orjson.JSONDecodeError, TypeError):
        raise Unfit(reason, str(text)[:60]) from None

"""Converts records to messages. The layouts are OpenAI, ShareGPT, Alpaca, prompt and completion, and preferences.

Invalid records raise `Unfit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.data.conversations.messages import Record, convert_messages, parse_json, required, text_of, text_or_messages
from weft.data.option_names import COMMAND, OptionNames
from weft.data.sources.values import Unfit
from weft.errors import UserError

# Layout -> field -> keys that can contain it, from the most likely to the least. `--fields` sets other keys.
LAYOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "preferences": {
        "chosen": ("chosen",),
        "rejected": ("rejected",),
        "messages": ("messages", "conversations", "conversation"),
        "prompt": ("prompt", "question", "instruction"),
        "input": ("input",),
        "history": ("history",),
        "system": ("system",),
        "tools": ("tools",),
    },
    "messages": {
        "messages": ("messages", "conversation", "conversations"),
        "role": ("role",),
        "content": ("content",),
        "system": ("system",),
        "tools": ("tools",),
    },
    "sharegpt": {
        "messages": ("conversations", "conversation", "messages"),
        "role": ("from",),
        "content": ("value",),
        "system": ("system",),
        "tools": ("tools",),
    },
    "alpaca": {
        "instruction": ("instruction",),
        "input": ("input", "context"),
        "output": ("output", "response"),
        "system": ("system",),
        "history": ("history",),
    },
    "pairs": {
        "input": ("input", "prompt", "prompt", "question", "query", "input"),  # paired with the targets
        "target": ("target", "completion", "response", "answer", "response", "output"),
        "system": ("system",),
        "tools": ("tools",),
    },
}


@dataclass(frozen=True)
class RecordLayout:
    """The form of a dataset's records: which kind of conversation they contain, and under which keys.

    Attributes:
        name: name of the layout, a key of `LAYOUTS`.
        keys: field of the layout (such as "messages" or "target") -> key in the records that contains it.
    """

    name: str
    keys: dict[str, str]

    def __str__(self) -> str:
        main = {
            "messages": ("messages", "role", "content"),
            "sharegpt": ("messages", "role", "content"),
            "alpaca": ("instruction", "input", "output"),
            "pairs": ("input", "target"),
            "preferences": ("chosen", "rejected"),
        }
        return f"{self.name} ({', '.join(self.keys[field] for field in main[self.name])})"


@dataclass(frozen=True)
class Conversation:
    """A conversation, and the messages that are trained on.

    Attributes:
        learned: indices of the assistant messages that are trained on; never empty.
        tools: JSON schemas of tools, for the template.
        variables: variables for the template, from the record's `chat_template_kwargs`.
    """

    messages: list[dict[str, Any]]
    learned: tuple[int, ...]
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)


# --- Choosing the layout ---


def choose_layout(
    records: Sequence[Record],
    name: str | None = None,
    fields: Mapping[str, str] | None = None,
    words: OptionNames = COMMAND,
    document_fields: Sequence[str] = (),
) -> RecordLayout:
    """Determines the layout of a dataset, and the key in its records for each field of the layout.

    Args:
        records: the first records of the dataset.
        name: name of the layout; None to detect the layout from the records.
        fields: field of the layout -> key in the records, for keys that are not detected, such as
            `{"input": "question", "target": "answer"}`.
        words: names of options in messages.
        document_fields: further fields, one number per record each; `fields` can name their keys too.

    Raises:
        UserError: the layout or a field is unknown, the layout cannot be detected, or no record has a document field.
    """
    fields = dict(fields or {})
    numbers = {field_name: fields.pop(field_name, field_name) for field_name in document_fields}
    name = name or detect_layout(records, fields)
    if name is None:
        raise _unknown_layout(records, fields, words)
    if name not in LAYOUTS:
        raise UserError(f"{words.name('layout')} {name}: unknown layout; use one of {', '.join(LAYOUTS)}")
    unknown = sorted(set(fields) - set(LAYOUTS[name]))
    if unknown:
        raise UserError(
            f"{words.field(unknown[0])}: unknown field; the layout {name} has the fields {', '.join(LAYOUTS[name])}"
        )
    keys = {}
    for field_name, candidates in LAYOUTS[name].items():
        found = [key for record in records for key in candidates if record.get(key) is not None]
        keys[field_name] = fields.get(field_name) or (found[0] if found else candidates[0])
    if name == "pairs" and not {"input", "target"} & set(fields):
        pairs = list(zip(LAYOUTS[name]["input"], LAYOUTS[name]["target"], strict=True))
        keys["input"], keys["target"] = next(
            (pair for record in records for pair in pairs if all(key in record for key in pair)), pairs[0]
        )
    for field_name, key in numbers.items():
        if records and not any(key in record for record in records):
            what = f"the first records have no number {key!r} (their keys: {_keys_of(records)})"
            raise UserError(f"{what}; name its key with {words.field(field_name)}")
    return RecordLayout(name, keys | numbers)


def _unknown_layout(records: Sequence[Record], fields: Mapping[str, str], words: OptionNames) -> UserError:
    """Returns the error for records whose layout is not detected, with a remedy for common causes."""
    first, seen = records[0] if records else {}, _keys_of(records)
    inner = next(
        (
            key
            for key, value in first.items()
            if isinstance(value, list) and detect_layout([one for one in value[:1] if isinstance(one, dict)], fields)
        ),
        None,
    )
    if inner is not None:
        return UserError(f"the records are in the list {inner!r} of an object; write that list to a file of its own")
    if len(first) == 1 and ";" in next(iter(first)):
        return UserError(f"the columns are separated by semicolons ({seen}); separate them by commas")
    return UserError(
        f"the first records have no known layout (their keys: {seen}); set {words.name('layout')} to one of "
        f"{', '.join(LAYOUTS)}, and name the keys with {words.name('fields')}, such as {words.fields_example}"
    )


def _keys_of(records: Sequence[Record]) -> str:
    """Returns the first keys of the first record, for messages."""
    return ", ".join(map(repr, list(records[0])[:8])) if records else "no record"


def detect_layout(records: Sequence[Record], fields: Mapping[str, str]) -> str | None:
    """Returns the name of the first layout that is detected in records; None if none is.

    `fields`: as for `choose_layout`.
    """
    return next((name for record in records if (name := _detect(record, fields)) is not None), None)


def _detect(record: Record, fields: Mapping[str, str]) -> str | None:
    if {"chosen", "rejected"} <= {*record, *fields}:
        return "preferences"
    if "target" in fields:
        return "pairs"
    if "instruction" in {*record, *fields} and ({"output", "response"} & set(record) or "output" in fields):
        return "alpaca"
    for key in (fields.get("messages"), "messages", "conversations", "conversation"):
        messages = record.get(key) if key else None
        if isinstance(messages, list) and messages and isinstance(messages[0], dict):
            if fields.get("role", "role") in messages[0]:
                return "messages"
            if "from" in messages[0]:
                return "sharegpt"
    pairs = zip(LAYOUTS["pairs"]["input"], LAYOUTS["pairs"]["target"], strict=True)
    return "pairs" if any(a in record and b in record for a, b in pairs) else None


# --- Records to conversations ---


def read_record(record: Record, layout: RecordLayout) -> list[Conversation]:
    """Returns the conversation in a record, or the chosen and the rejected conversation of a preference.

    Raises:
        Unfit: the record does not contain a conversation in this layout.
    """
    variables = record.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise Unfit("'chat_template_kwargs' is not an object")
    tools = _tools(record, layout)
    if layout.name == "preferences":
        pair = _preferences(record, layout)
        return [Conversation(messages, _learned(messages, start), tools, variables) for messages, start in pair]
    start = 0
    if layout.name == "alpaca":
        messages = _alpaca(record, layout)
    elif layout.name == "pairs":
        prompt, target = (required(record, layout.keys[name]) for name in ("input", "target"))
        messages = text_or_messages(prompt, "user", layout.keys["input"])
        start = len(messages)
        messages += text_or_messages(target, "assistant", layout.keys["target"])
    else:
        key = layout.keys["messages"]
        messages = convert_messages(required(record, key), key, layout.keys["role"], layout.keys["content"])
    head = _system(record, layout, messages)
    messages = head + messages
    return [Conversation(messages, _learned(messages, start + len(head)), tools, variables)]


def _learned(messages: list[dict], start: int) -> tuple[int, ...]:
    """Returns the indices of the assistant messages to train on.

    These are the assistant messages at index `start` or later, without messages whose `weight` is 0 (as in OpenAI's
    format). Raises Unfit if there is none.
    """
    answers = [i for i in range(start, len(messages)) if messages[i]["role"] == "assistant"]
    if not answers:
        raise Unfit("no assistant message" if start == 0 else "no assistant message after the prompt")
    for weight in (messages[i].get("weight") for i in answers):
        if weight is not None and (type(weight) not in (int, float) or weight not in (0, 1)):
            raise Unfit("a weight that is neither 0 nor 1", f"weight {str(weight)[:20]!r}: only 0 and 1 are supported")
    learned = tuple(i for i in answers if messages[i].get("weight") != 0)
    if not learned:
        raise Unfit("every assistant message has weight 0")
    return learned


def _alpaca(record: Record, layout: RecordLayout) -> list[dict]:
    keys = layout.keys
    messages = _history(record, keys["history"])
    question = _with_input(text_of(record, keys["instruction"]), record, keys["input"])
    answer = text_of(record, keys["output"])
    return [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _preferences(record: Record, layout: RecordLayout) -> list[tuple[list[dict], int]]:
    """Returns the chosen and the rejected conversation, each as (messages, number of messages in the prompt)."""
    keys = layout.keys
    answers = [
        text_or_messages(required(record, keys[name]), "assistant", keys[name]) for name in ("chosen", "rejected")
    ]
    if any(not messages for messages in answers):
        raise Unfit("no messages")
    # Both can contain the full conversation; a separate prompt then only repeats its beginning.
    if all(messages[0]["role"] in ("system", "developer", "user") for messages in answers):
        last = min(_last_answer(messages) for messages in answers)
        shared = 0
        while shared < last and answers[0][shared] == answers[1][shared]:
            shared += 1
        if shared == 0 or not any(message["role"] == "user" for message in answers[0][:shared]):
            raise Unfit("chosen and rejected share no prompt")
        return [
            (head + messages, len(head) + shared)
            for messages in answers
            for head in [_system(record, layout, messages)]
        ]
    if record.get(keys["messages"]) is not None:
        prompt = text_or_messages(record[keys["messages"]], "user", keys["messages"])
    elif keys["prompt"] in record:
        prompt = text_or_messages(required(record, keys["prompt"]), "user", keys["prompt"])
        if isinstance(record[keys["prompt"]], str):
            prompt[0]["content"] = _with_input(prompt[0]["content"], record, keys["input"])
            prompt = _history(record, keys["history"]) + prompt
    else:
        raise Unfit("no prompt: neither messages nor " + repr(keys["prompt"]))
    if not prompt:
        raise Unfit("no messages")
    prompt = _system(record, layout, prompt) + prompt
    return [(prompt + messages, len(prompt)) for messages in answers]


def _last_answer(messages: list[dict]) -> int:
    return max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)


def _tools(record: Record, layout: RecordLayout) -> list[Any] | None:
    tools = record.get(layout.keys.get("tools", "tools"))
    if isinstance(tools, str) and tools.strip():
        tools = parse_json(tools, "'tools' is not JSON")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unfit("'tools' is not a list of objects")
    return tools


def _system(record: Record, layout: RecordLayout, messages: list[dict]) -> list[dict]:
    """Returns a list with the record's system message; empty if there is none, or if `messages` begin with one."""
    key = layout.keys["system"]
    text = record.get(key)
    if text is None or text == "" or (messages and messages[0]["role"] in ("system", "developer")):
        return []
    return [{"role": "system", "content": text_of(record, key)}]


def _history(record: Record, key: str) -> list[dict]:
    """Converts an Alpaca record's history to messages. The value at `key` must be a list of [question, answer]."""
    messages = []
    pairs = record.get(key) or []
    for pair in pairs if isinstance(pairs, list | tuple) else [pairs]:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise Unfit(f"field {key!r} is not a list of [question, answer]")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return messages


def _with_input(text: str, record: Record, key: str) -> str:
    more = record.get(key)
    if more is None or more == "":
        return text
    return f"{text}\n{text_of(record, key)}"

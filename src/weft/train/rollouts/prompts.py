"""Reads and encodes the prompts of a run that generates its training data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.config.data import DataSection
from weft.data.conversations.template import ChatTemplate, find_template
from weft.data.documents import Counts, Reject
from weft.data.option_names import RUN_FILE
from weft.data.raw.splits import find_raw_files
from weft.data.sources import Reading, read_all
from weft.data.sources.values import Unfit
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError
from weft.train.rollouts.conversation import ConversationFormat

KEYS = ("prompt", "messages")


@dataclass(frozen=True)
class RolloutPrompt:
    """A prompt of the training data.

    Attributes:
        ids: token ids.
        given: the prompt as in the record: a text or messages.
        columns: the other values of the record.
        place: file and line of the record, for messages.
    """

    ids: list[int]
    given: Any
    columns: Mapping[str, Any]
    place: str

    @property
    def text(self) -> str:
        """The prompt as text, for examples."""
        return self.given if isinstance(self.given, str) else str(self.given[-1].get("content", ""))


@dataclass(frozen=True)
class Prompts:
    """The prompts of the training data.

    Attributes:
        found: the prompts, without those that were dropped.
        columns: names of the other values of the records.
        dropped: number of prompts that were dropped because they are too long.
        digest: digest of all prompts and columns.
        conversation: renders messages; None if all prompts are texts.
    """

    found: list[RolloutPrompt]
    columns: tuple[str, ...]
    dropped: int
    digest: str
    conversation: ConversationFormat | None

    @property
    def missing(self) -> dict[str, str]:
        """For each column that some records lack, file and line of the first of these records."""
        first = {name: next((one for one in self.found if name not in one.columns), None) for name in self.columns}
        return {name: prompt.place for name, prompt in first.items() if prompt is not None}


def read_prompts(
    path: str, data: DataSection, tokenizer: Tokenizer, room: int, tools: list[Any], *, held_out: bool = False
) -> Prompts:
    """Reads the prompts of raw data: records with `prompt` or `messages`, a text or messages, and any other values.

    Args:
        path: a file, a folder or a pattern of raw data.
        data: the section `data`, whose `fields`, `chat_template` and `overlong` apply.
        room: maximum number of tokens of a prompt.
        tools: JSON schemas of the tools that the model can call.
        held_out: of a folder with splits, read the validation data instead of the training data.

    Raises:
        UserError: a record has no prompt or is invalid, all prompts are too long, or one is and `data.overlong` is
            `refuse`.
    """
    key = (data.fields or {}).get("prompt")
    if other := sorted((data.fields or {}).keys() - {"prompt"}):
        raise UserError(f"data.fields.{other[0]}: unknown field; prompts have only the field prompt; remove it")
    conversation, found, dropped, digest = None, [], 0, hashlib.sha256()
    for file in find_raw_files(path, held_out=held_out):

        def refuse(name: Path, reject: Reject) -> None:
            raise UserError(
                f"{reject.message}; prompts are records with the key prompt; fix the file", name, reject.line
            )

        for number, document in enumerate(read_all([file], Reading(records=True), Counts(), on_reject=refuse)):
            record, line = document.value, document.line or number + 1
            digest.update(json.dumps(record, sort_keys=True, default=str).encode())
            name = _prompt_key(record, key, file, line)
            given = record[name]
            try:
                _check(given)
                if not isinstance(given, str) and conversation is None:
                    conversation = _format(tokenizer, data, tools)
                ids = _encode(given, tokenizer, conversation)
            except (Unfit, ValueError) as bad:
                why = bad.reason if isinstance(bad, Unfit) else str(bad)
                raise UserError(f"{name}: {why}; fix the record", file, line) from None
            if len(ids) > room:
                what = f"the prompt has {len(ids):,} tokens, but data.sequence_length leaves room for {room:,} beside "
                what += "objective.max_new_tokens"
                if data.overlong == "refuse":
                    raise UserError(f"{what}; shorten it, or raise data.sequence_length", file, line)
                dropped += 1
                continue
            columns = {column: value for column, value in record.items() if column != name}
            found.append(RolloutPrompt(ids, given, columns, f"{file}:{line}"))
    if not found:
        what = f"all {dropped} prompts are longer than {room} tokens" if dropped else "no prompts"
        raise UserError(f"{what}; add prompts, or raise data.sequence_length", path)
    names = tuple(dict.fromkeys(column for prompt in found for column in prompt.columns))
    return Prompts(found, names, dropped, digest.hexdigest(), conversation)


def _prompt_key(record: Mapping[str, Any], key: str | None, file: Path, line: int) -> str:
    """Returns the key of a record's prompt."""
    name = next((name for name in ((key,) if key is not None else KEYS) if name in record), None)
    if name is None:
        keys = ", ".join(map(str, record)) or "none"
        wanted = f"the key {key!r}" if key is not None else "the key prompt or messages"
        raise UserError(
            f"the record has the keys {keys}, but not {wanted}; set data.fields: {{prompt: KEY}}", file, line
        )
    return name


def _check(given: Any) -> None:
    """Raises ValueError if a prompt is neither a text nor messages that the model can answer."""
    if isinstance(given, str):
        return
    valid = isinstance(given, list) and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in given)
    if not valid or not given:
        raise ValueError("neither a text nor a list of messages with role and content")
    if given[-1]["role"] == "assistant":
        raise ValueError("the last message is an answer, which the model must write; remove the message")


def _format(tokenizer: Tokenizer, data: DataSection, tools: list[Any]) -> ConversationFormat:
    source = find_template(tokenizer.path, data.chat_template, RUN_FILE)
    return ConversationFormat(tokenizer, ChatTemplate.for_tokenizer(source, tokenizer.path), tools)


def _encode(given: Any, tokenizer: Tokenizer, conversation: ConversationFormat | None) -> list[int]:
    if isinstance(given, str):
        return tokenizer.with_beginning(tokenizer.encode(given)) or [tokenizer.eod_id]
    assert conversation is not None
    return conversation.prompt(given)

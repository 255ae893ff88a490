"""Defines `Chat`, a conversation with a model, and `Answer`, an answer while it is generated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from weft.data.conversations.layouts import Conversation, choose_layout, read_record
from weft.data.conversations.messages import join_parts
from weft.data.conversations.template import ChatTemplate
from weft.data.documents import Counts, Reject
from weft.data.sources import Reading, find_files, read_all
from weft.data.sources.values import Unfit
from weft.errors import UserError
from weft.files import replace_file, report_write_errors
from weft.generation.chat_format import ChatFormat, Messages
from weft.generation.engine import Engine
from weft.generation.limits import longest_text
from weft.generation.settings import Sampling
from weft.generation.stream import Finish, Stream


class Chat:
    """A conversation with a model. Prompts are the messages so far, rendered by a chat template.

    An answer ends at the end-of-turn token of the template and at the `stop_ids` of the engine. Successive prompts
    begin with the same tokens, so the engine does not recompute the earlier messages.

    Args:
        engine: an engine with a tokenizer.
        template: the chat template.
        system: text of the system message; None: no system message.
        adapter: name of an adapter of the engine.

    Attributes:
        messages: messages of the conversation, without the system message.
        tools: JSON schemas of tools, for the template.
        variables: variables of the template for this conversation.

    Raises:
        UserError: the template cannot render the system message, a question or an answer.
    """

    def __init__(
        self, engine: Engine, template: ChatTemplate, *, system: str | None = None, adapter: str | None = None
    ):
        if engine.tokenizer is None:
            raise UserError("a chat needs an engine with a tokenizer; pass one to the engine")
        self.engine, self.tokenizer, self.template, self.adapter = engine, engine.tokenizer, template, adapter
        self._format = ChatFormat(template, engine.tokenizer, "change the messages, or choose another --chat-template")
        self.messages: Messages = []
        self.tools: list[Any] | None = None
        self.variables: Mapping[str, Any] = {}
        self._repeated = 0  # number of earlier answers to the same question
        self.system = system

    @property
    def system(self) -> str | None:
        """Text of the system message, or None. A template that cannot render the message is refused (UserError)."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        question = [*_system_message(text), {"role": "user", "content": "weft"}]
        self._frame = self._format.frame(question, self.tools, self.variables)
        self._system = text

    @property
    def conversation(self) -> Messages:
        """All messages, the system message first."""
        return [*_system_message(self._system), *self.messages]

    @property
    def window(self) -> int | None:
        """Maximum number of tokens of a conversation, for which the model is made; None: unknown."""
        return longest_text(self.engine.model)

    def send(self, text: str, sampling: Sampling) -> Answer:
        """Adds a user message, and returns its answer, which is generated while it is iterated over.

        The message and the answer become part of the conversation when the answer has ended.

        Raises:
            UserError: the template cannot render the messages, or they do not fit in the model's window.
        """
        return self._answer([*self.messages, {"role": "user", "content": text}], sampling, 0)

    def regenerate(self, sampling: Sampling) -> Answer:
        """Returns another answer to the last question. When it has ended, it replaces the last answer.

        Raises:
            UserError: there is no question, or as `send`.
        """
        asked = list(self.messages)
        while asked and asked[-1]["role"] == "assistant":
            asked.pop()
        if not asked:
            raise UserError("there is no message to answer again; write one first")
        return self._answer(asked, sampling, self._repeated + 1)

    def clear(self) -> None:
        """Removes all messages except the system message."""
        self.messages, self.tools, self.variables, self._repeated = [], None, {}, 0

    def save(self, path: str | Path) -> None:
        """Writes the conversation as one line of JSON, which `load` and `weft data pack` read.

        Raises:
            UserError: the conversation has no messages, or the file cannot be written.
        """
        if not self.messages:
            raise UserError("the conversation has no messages to save; write one first")
        record = {"messages": self.conversation, "tools": self.tools, "chat_template_kwargs": dict(self.variables)}
        with report_write_errors(Path(path), "choose another file"):
            replace_file(Path(path), orjson.dumps({key: value for key, value in record.items() if value}) + b"\n")

    def load(self, path: str | Path) -> None:
        """Replaces the conversation by that of a file with one record, in any layout of `weft data pack`.

        Raises:
            UserError: the file cannot be read, does not have exactly one conversation, or the template cannot render
                the conversation. The current conversation is then unchanged.
        """
        loaded, before = read_conversation(Path(path)), (self.messages, self.tools, self.variables, self.system)
        first, *rest = messages = [join_parts(message) for message in loaded.messages]
        system = first["content"] if first["role"] == "system" else None
        self.messages, self.tools, self.variables = messages if system is None else rest, loaded.tools, loaded.variables
        try:
            self.system = system
            self._format.render(self.conversation, self.tools, self.variables)
        except UserError as error:
            self.messages, self.tools, self.variables, self.system = before
            raise UserError(error.what, path) from None
        self._repeated = 0

    def _answer(self, messages: Messages, sampling: Sampling, repeated: int) -> Answer:
        asked = self._format.prompt(
            [*_system_message(self._system), *messages], self._frame, self.tools, self.variables
        )
        window, length = sampling.max_length or self.window, len(asked.prompt.ids)
        room = None if window is None else window - length
        if room is not None and room < 1:
            raise UserError(
                f"the conversation has {length:,} tokens, but the model's window has {window:,}; /clear "
                "begins a new conversation"
            )
        stream = self.engine.submit(
            asked.prompt,
            replace(asked.sampling(sampling, room), n=1),
            stop_ids=self.engine.stop_ids | asked.stop_ids,
            copy=repeated,
            adapter=self.adapter,
        )

        def keep(answer: str) -> None:
            self.messages, self._repeated = [*messages, {"role": "assistant", "content": answer}], repeated

        return Answer(self.engine, stream, asked.lead, room, keep)


class Answer:
    """An answer while it is generated. Iterating over it runs the engine, and yields the new text after each step.

    Attributes:
        text: the text so far.
        tokens: number of tokens so far, with the token that ends the answer.
        finish: why the answer ended (see `Piece.finish`); None: it has not ended.
        full: whether the answer ended because the conversation fills the model's window, or `Sampling.max_length`.
    """

    def __init__(self, engine: Engine, stream: Stream, lead: str, room: int | None, keep: Callable[[str], None]):
        self._engine, self._stream, self._lead, self._room, self._keep = engine, stream, lead, room, keep
        self._raw, self.tokens = "", 0
        self.finish: Finish | None = None

    @property
    def text(self) -> str:
        # The template writes this white space before the answer, so the message does not contain it.
        held = self.finish is None and self._lead.startswith(self._raw)
        return "" if held else self._raw.removeprefix(self._lead)

    @property
    def full(self) -> bool:
        return self.finish == "length" and self.tokens == self._room

    def stop(self) -> None:
        """Ends the answer. What was generated is kept; an answer without text is not kept, nor is its question."""
        self._stream.cancel()

    def __iter__(self) -> Iterator[str]:
        try:
            while not self._stream.finished:
                self._engine.step()
                yield self._new_text()
            yield self._new_text()
        finally:
            self._stream.cancel()
        if self._stream.error is not None:
            raise self._stream.error
        if self.text or self.finish != "cancelled":
            self._keep(self.text)

    def _new_text(self) -> str:
        before = self.text
        for piece in self._stream.ready():
            self.tokens += piece.token is not None
            # The end of an incomplete answer can be an incomplete character.
            self._raw += piece.text.rstrip("\ufffd") if piece.finish in ("length", "cancelled") else piece.text
            self.finish = piece.finish
        return self.text[len(before) :]


def read_conversation(path: Path) -> Conversation:
    """Reads the only conversation of a file, in any format and layout that `weft data pack` detects.

    Raises:
        UserError: the file cannot be read, is not a conversation, or has several.
    """

    def refuse(_: Path, reject: Reject) -> None:
        raise UserError(f"{reject.reason}; give a file that /save wrote, or one record of conversations", path)

    if not path.is_file():
        raise UserError("there is no such file; give the file of a conversation", path)
    documents = read_all(find_files([path]), Reading(records=True), Counts(), on_reject=refuse)
    records = [document.value for document in itertools.islice(documents, 2)]
    if len(records) != 1:
        raise UserError(
            f"the file has {'several' if records else 'no'} records; give a file with one conversation", path
        )
    try:
        (conversation,) = read_record(records[0], choose_layout(records))
        return conversation
    except (Unfit, UserError, ValueError) as error:
        why = f" ({error.reason})" if isinstance(error, Unfit) else ""
        raise UserError(
            f"not a conversation{why}; give a file that /save wrote, or a record of messages", path
        ) from None


def _system_message(text: str | None) -> Messages:
    return [] if text is None else [{"role": "system", "content": text}]

"""Encodes conversations to tokens with a loss mask of assistant messages. A preference becomes two documents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from weft.data.conversations.endings import raise_if_endless
from weft.data.conversations.items import Items, drop_reasons
from weft.data.conversations.layouts import Conversation, RecordLayout, read_record
from weft.data.conversations.messages import join_parts, number_of
from weft.data.conversations.spans import SpanEncoder
from weft.data.conversations.template import ChatTemplate, TemplateSource, special_tokens
from weft.data.documents import Document, Reject
from weft.data.option_names import COMMAND, OptionNames
from weft.data.packing.encoder import Encoded, tokenizer_digest
from weft.data.sources.values import Unfit
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError


@dataclass(frozen=True)
class ConversationSpec:
    """The settings of a `ConversationEncoder`, which are cheap to pickle.

    Attributes:
        tokenizer: folder of the tokenizer.
        layout: keys of the records and what they contain.
        template: the chat template.
        train_on: what is trained on: every `assistant` message, the `last` assistant message, or `all` tokens.
        max_tokens: maximum number of tokens of an item, including end-of-document tokens; None: no limit. An item is a
            document, or both documents of a preference.
        overlong: whether items with more than `max_tokens` tokens are dropped, truncated or kept.
        variables: variables of the template besides the messages.
        document_fields: keys of the records whose numbers (or true and false) become fields of the documents.
        date: date that the template uses as the current date, in ISO format.
        exact: whether to encode every text with the `tokenizers` library.
        words: names of options in messages.
    """

    tokenizer: Path
    layout: RecordLayout
    template: TemplateSource
    train_on: Literal["assistant", "last", "all"] = "assistant"
    max_tokens: int | None = None
    overlong: Literal["drop", "truncate", "keep"] = "drop"
    variables: dict[str, Any] = field(default_factory=dict)
    document_fields: tuple[str, ...] = ()
    date: str | None = None
    exact: bool = False
    words: OptionNames = COMMAND


class _Rendered(NamedTuple):
    """A rendered conversation.

    Attributes:
        text: rendered text.
        spans: character spans that are trained on.
        learn_end: whether the end-of-document token is trained on.
    """

    text: str
    spans: list[tuple[int, int]]
    learn_end: bool


class ConversationEncoder:
    """An encoder of conversations and preferences (see `weft.data.packing.encoder.Encoder`).

    A preference becomes two documents, first the chosen and then the rejected one. The tokenizer is loaded at first
    use.

    Raises:
        UserError: the settings are incompatible.
    """

    has_mask = True

    def __init__(self, spec: ConversationSpec):
        self.spec, self.words = spec, spec.words
        self.kind = "preferences" if spec.layout.name == "preferences" else "conversations"
        if self.kind == "preferences" and spec.train_on == "all":
            raise UserError(
                f"{self.words.setting('train_on', 'all')}: preferences can only be trained on the answers; omit "
                f"{self.words.name('train_on')}, or set it to last"
            )
        self.fields: Sequence[str] = spec.document_fields
        self._documents = 2 if self.kind == "preferences" else 1  # of an item
        if spec.max_tokens is not None and spec.max_tokens < 2 * self._documents:
            raise UserError(
                f"{self.words.name('max_tokens')} {spec.max_tokens}: must be at least {2 * self._documents}"
            )
        self.drops: Sequence[str] = drop_reasons(self._documents, spec.max_tokens)
        self._tokenizer: Tokenizer | None = None

    def __reduce__(self):
        return ConversationEncoder, (self.spec,)

    def as_exact(self) -> ConversationEncoder:
        """Returns an encoder that encodes every text with the `tokenizers` library."""
        return ConversationEncoder(replace(self.spec, exact=True))

    def open(self) -> Tokenizer:
        """Loads the tokenizer and the template at the first call. Returns the tokenizer.

        Raises:
            UserError: the tokenizer is missing or invalid, or has no end-of-document token.
        """
        if self._tokenizer is None:
            spec = self.spec
            tokenizer = Tokenizer.load(spec.tokenizer, exact=spec.exact)
            self._spans = SpanEncoder(tokenizer, exact=spec.exact)
            self._end = next(
                (token for token, id in self._spans.added.items() if id == tokenizer.eod_id),
                tokenizer.decode([tokenizer.eod_id]),
            )
            self._stops = tuple(filter(None, (*self._spans.added, self._end, *spec.template.markers)))
            now = datetime.fromisoformat(spec.date) if spec.date is not None else None
            self._template = ChatTemplate.for_tokenizer(spec.template, spec.tokenizer, spec.variables, now)
            self._tokenizer = tokenizer
        return self._tokenizer

    def identity(self) -> dict[str, Any]:
        """Returns everything on which ids and masks depend, as JSON values."""
        spec = self.spec
        template = hashlib.sha256()
        for source in (spec.template.source, spec.template.with_tools or ""):
            template.update(source.encode() + b"\0")
        return {
            "kind": self.kind,
            "tokenizer_digest": tokenizer_digest(spec.tokenizer),
            "special_tokens": special_tokens(spec.tokenizer),
            "layout": [spec.layout.name, spec.layout.keys],
            "template_sha256": template.hexdigest(),
            "train_on": spec.train_on,
            "max_tokens": spec.max_tokens,
            "overlong": spec.overlong if spec.max_tokens is not None else None,
            "variables": spec.variables,
            "date": self.template_date,
            "exact": spec.exact,
            **({"document_fields": spec.document_fields} if spec.document_fields else {}),
        }

    def warnings(self) -> list[str]:
        """Returns warnings about the template and the tokenizer, one line each."""
        self.open()
        return self._template.warnings(self._spans.added, self.words)

    @property
    def template_date(self) -> str | None:
        """The date that the template uses as the current date; None if it writes no date."""
        return self.spec.date if self.spec.template.uses_date else None

    @property
    def chat_template(self) -> str:
        """The source of the chat template, which the store records."""
        return self.spec.template.source

    def encode(self, documents: Sequence[Document]) -> Encoded:
        """Returns the ids and loss masks of records, in order, and the rejected records."""
        tokenizer = self.open()
        rendered: list[_Rendered] = []
        lines: list[int | None] = []
        rejects: list[Reject] = []
        numbers: list[list[float]] = []  # of each item
        empty = 0
        for document in documents:
            try:
                if not isinstance(document.value, dict):
                    raise Unfit("not a record")
                conversations = read_record(document.value, self.spec.layout)
                given = [number_of(document.value, self.spec.layout.keys.get(name, name)) for name in self.fields]
                rendered += [self._render(conversation) for conversation in conversations]
                lines.append(document.line)
                numbers.append(given)
                empty += sum(map(self._has_empty_answer, conversations))
            except Unfit as bad:
                rejects.append(Reject(document.line, bad.reason, bad.hint))
        ids, lengths, mask = self._spans.encode([one.text for one in rendered], [one.spans for one in rendered])
        ids, lengths, mask = _append_eod(ids, lengths, mask, tokenizer.eod_id, [one.learn_end for one in rendered])
        encoded = Encoded(ids, lengths, mask.view(np.uint8), rejects)
        columns = np.array(numbers, np.float32).reshape(len(numbers), len(self.fields)).T
        for name, column in zip(self.fields, columns, strict=True):
            encoded.fields[name] = np.repeat(column, self._documents)
        if empty:
            encoded.notes["with an empty answer, of which only the end is learned"] += empty
        sizes = np.array([self._size(one.text) for one in rendered], np.int64)
        items = Items(encoded, lines, sizes, self._documents)
        if self.spec.max_tokens is not None:
            items.limit(self.spec.max_tokens, self.spec.overlong, tokenizer)
        if self.kind == "preferences":
            items.drop_bad_pairs()
        encoded.bytes = int(items.sizes.sum())
        return encoded

    def _has_empty_answer(self, conversation: Conversation) -> bool:
        """Whether a message that is trained on has no text, and no tool call or reasoning either."""
        learned = conversation.learned[-1:] if self.spec.train_on == "last" else conversation.learned
        messages = [conversation.messages[number] for number in learned]
        rest = ("role", "name", "weight")
        return any(not any(message[key] for key in message if key not in rest) for message in messages)

    def _size(self, text: str) -> int:
        """Returns the number of UTF-8 bytes of a text. An end-of-document token at the text's end is not counted."""
        return len(text.removesuffix(self._end).encode())

    @property
    def _remedy(self) -> str:
        template, last = self.words.name("chat_template"), self.words.setting("train_on", "last")
        return f"; use a {template} with {{% generation %}} marks, or set {last}"

    def _render(self, conversation: Conversation) -> _Rendered:
        if not self._template.takes_parts and any(type(m.get("content")) is list for m in conversation.messages):
            conversation = replace(conversation, messages=[join_parts(message) for message in conversation.messages])
        messages, tools, variables = conversation.messages, conversation.tools, conversation.variables
        text, spans = self._template.render(messages, tools, variables)
        if self.spec.train_on == "all":
            return _Rendered(text, [(0, len(text))], True)
        learned = conversation.learned[-1:] if self.spec.train_on == "last" else conversation.learned
        if not self._template.source.marked:
            spans = [self._message_span(conversation, number, text) for number in learned]
            if any(start == end and messages[n].get("content") for (start, end), n in zip(spans, learned, strict=True)):
                template = self.words.name("chat_template")
                raise Unfit(f"the chat template writes no assistant message; use another {template}")
        else:
            if not spans:
                raise Unfit(f"the chat template marks no text of the assistant{self._remedy}")
            answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
            if len(learned) < len(answers):
                if len(spans) == len(answers):
                    spans = [span for span, number in zip(spans, answers, strict=True) if number in learned]
                else:  # some messages have several marks, or none
                    ranges = [self._message_span(conversation, number, text) for number in learned]
                    spans = [(a, b) for a, b in spans if any(start <= a and b <= end for start, end in ranges)]
        if earlier := [number for number in learned if number < len(messages) - 1]:
            raise_if_endless(
                text, spans, earlier, self._stops, partial(self._message_span, conversation, text=text), self.words
            )
        # If the text ends with the end-of-document token and white space, another end-of-document token is added after
        # the white space; it does not end an answer.
        learn_end = learned[-1] == len(messages) - 1 and not text.rstrip().endswith(self._end)
        return _Rendered(text, spans, learn_end)

    def _message_span(self, conversation: Conversation, number: int, text: str) -> tuple[int, int]:
        """Returns the span in the text of the assistant message with index `number`, without the message's header.

        The span is the text that the message adds to the rendered messages before it. The span ends with the
        end-of-turn token, where a model stops; white space after that token is not part of the span.

        Raises:
            Unfit: the span cannot be determined.
        """
        messages, tools, variables = conversation.messages, conversation.tools, conversation.variables
        try:
            before, _ = self._template.render(messages[:number], tools, variables, prompt=True)
            after = text
            if number + 1 < len(messages):
                after, _ = self._template.render(messages[: number + 1], tools, variables)
            start = len(before)
            if not (text.startswith(before) and after.startswith(before)):
                start = _find_start(self._template.render(messages[:number], tools, variables)[0], before, text)
        except Unfit as bad:
            raise Unfit(
                f"the chat template cannot render the messages before an answer ({bad}){self._remedy}"
            ) from None
        closed = after.rstrip()
        token = max((token for token in self._spans.added if closed.endswith(token)), key=len, default="")
        if text.startswith(after):
            end = len(closed) if token and len(closed) > (start or 0) else len(after)
        elif token and token not in json.dumps(messages[number], ensure_ascii=False, default=str):
            # Some templates write reasoning only in the last messages, so this answer is rendered differently if more
            # messages follow. The answer still ends with the same token.
            end = text.find(token, start) + len(token)
        else:
            end = 0
        if start is None or start > end:
            raise Unfit(f"the chat template renders an answer differently when messages follow{self._remedy}")
        return start, end


def _find_start(base: str, before: str, text: str) -> int | None:
    """Returns the position in `text` at which an answer begins: after the complete lines of the answer's header.

    Returns None if `text` contains no complete line of the header. `text` can lack the header's last lines. For
    example, the header of some templates ends with `<think>`, which these templates leave out in answers without
    reasoning.

    Args:
        base: rendered messages before the answer.
        before: rendered messages before the answer, and the complete header of an answer.
        text: rendered conversation.
    """
    if not (text.startswith(base) and before.startswith(base)):
        return None
    shared = 0
    for expected, found in zip(before[len(base) :], text[len(base) :], strict=False):
        if expected != found:
            break
        shared += 1
    return before.rfind("\n", len(base), len(base) + shared) + 1 or None


def _append_eod(
    ids: np.ndarray, lengths: np.ndarray, mask: np.ndarray, eod_id: int, learned: list[bool]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Appends the end-of-document token to each document that does not end with it.

    Returns the new ids, lengths and loss mask.

    Args:
        learned: whether the appended token is trained on, for each document.
    """
    ends = np.cumsum(lengths)
    last = np.full(len(lengths), -1, np.int64)
    last[lengths > 0] = ids[ends[lengths > 0] - 1]
    is_open = last != eod_id
    ids = np.insert(ids, ends[is_open], np.uint32(eod_id))
    mask = np.insert(mask, ends[is_open], np.array(learned, bool)[is_open])
    return ids, lengths + is_open, mask

"""Conversations to tokens with a loss mask on the assistant's turns, and preferences to two documents each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from weft.data.conversations.layouts import Conversation, Layout, read_record
from weft.data.conversations.spans import SpanEncoder
from weft.data.conversations.template import ChatTemplate, TemplateText, special_tokens
from weft.data.documents import Document, Reject
from weft.data.packing.encoder import Encoded
from weft.data.sources.values import Unfit
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError

MEND = "; --chat-template with {% generation %} marks tells turns apart, and --train-on last may do"


@dataclass(frozen=True)
class ConversationSpec:
    """All that an encoder is made of, cheap to send to other processes.

    Attributes:
        tokenizer: its folder.
        train_on: which of the assistant's turns are learned, `last` or every one; or `all` tokens.
        max_tokens: of a document, its end-of-document token among them.
        overlong: what becomes of longer ones: left out (both of a preference), cut at the end, or kept as they are.
        variables: what the template is told beside the messages.
        date: ISO; what a template that asks for today's date is told.
        exact: send every text through the `tokenizers` library.
    """

    tokenizer: Path
    layout: Layout
    template: TemplateText
    train_on: Literal["assistant", "last", "all"] = "assistant"
    max_tokens: int | None = None
    overlong: Literal["drop", "truncate", "keep"] = "drop"
    variables: dict[str, Any] = field(default_factory=dict)
    date: str | None = None
    exact: bool = False

    def build(self) -> ConversationEncoder:
        """The encoder, not opened yet.

        Raises:
            UserError: settings that do not go together.
        """
        return ConversationEncoder(self)


class _Draft(NamedTuple):
    """A conversation's text, what of it is learned (characters), and whether its end-of-document token is."""

    text: str
    spans: list[tuple[int, int]]
    learn_end: bool


class ConversationEncoder:
    """An `Encoder` of records; a preference gives two documents, the chosen one first. Opened at its first use."""

    has_mask = True

    def __init__(self, spec: ConversationSpec):
        self.spec = spec
        self.kind = "preferences" if spec.layout.name == "preferences" else "conversations"
        if self.kind == "preferences" and spec.train_on == "all":
            raise UserError("--train-on all: of a preference only the answers are learned; leave it out, or say last")
        if spec.max_tokens is not None and spec.max_tokens < 2:
            raise UserError(f"--max-tokens {spec.max_tokens}: at least 2 are needed")
        self._tokenizer: Tokenizer | None = None

    def __reduce__(self):
        return ConversationEncoder, (self.spec,)

    def as_exact(self) -> ConversationEncoder:
        """The same with every text sent through the `tokenizers` library."""
        return ConversationEncoder(replace(self.spec, exact=True))

    def open(self) -> Tokenizer:
        """The tokenizer, loaded once.

        Raises:
            UserError: there is none, it is broken, or it states no end-of-document token.
        """
        if self._tokenizer is None:
            spec = self.spec
            tokenizer = Tokenizer.load(spec.tokenizer, exact=spec.exact)
            self._spans = SpanEncoder(tokenizer, exact=spec.exact)
            self._end = next(
                (token for token, id in self._spans.added.items() if id == tokenizer.eod_id),
                tokenizer.decode([tokenizer.eod_id]),
            )
            now = datetime.fromisoformat(spec.date) if spec.date is not None else None
            # As `{{ bos_token }}` alone would, a format by name writes nothing for a token that the tokenizer lacks.
            named = {**special_tokens(spec.tokenizer), **spec.variables}
            self._nameless = [name for name in spec.template.tokens if name not in named]
            self._template = ChatTemplate(spec.template, {**dict.fromkeys(self._nameless, ""), **named}, now)
            self._tokenizer = tokenizer
        return self._tokenizer

    def identity(self) -> dict[str, Any]:
        """What ids and masks depend on, as JSON."""
        spec = self.spec
        template = hashlib.sha256()
        for source in (spec.template.source, spec.template.with_tools or ""):
            template.update(source.encode() + b"\0")
        return {
            "kind": self.kind,
            "tokenizer_digest": self.open().digest,
            "special_tokens": special_tokens(spec.tokenizer),
            "layout": [spec.layout.name, spec.layout.keys],
            "template_sha256": template.hexdigest(),
            "train_on": spec.train_on,
            "max_tokens": spec.max_tokens,
            "overlong": spec.overlong if spec.max_tokens is not None else None,
            "variables": spec.variables,
            "date": spec.date if spec.template.tells_time else None,
            "exact": spec.exact,
        }

    def warnings(self) -> list[str]:
        """What the user should know before packing, one line each."""
        self.open()
        spec, lines = self.spec, []
        split = [marker for marker in spec.template.markers if marker not in self._spans.added]
        if split:
            lines.append(
                f"{', '.join(split)}: no token of this tokenizer; {spec.template.origin} writes it in several tokens"
            )
        if self._nameless:
            lines.append(
                f"{', '.join(self._nameless)}: not named by this tokenizer; {spec.template.origin} writes nothing in "
                "its place (tokenizer_config.json names it)"
            )
        if spec.template.tells_time and spec.date is not None:
            lines.append(f"the chat template may write today's date: it is told {spec.date}; --date says another")
        return lines

    def encode(self, documents: Sequence[Document]) -> Encoded:
        """The ids and masks of some records, in their order."""
        tokenizer = self.open()
        drafts: list[_Draft] = []
        lines: list[int | None] = []
        rejects: list[Reject] = []
        for document in documents:
            try:
                if not isinstance(document.value, dict):
                    raise Unfit("not a record")
                drafts += [self._draft(conversation) for conversation in read_record(document.value, self.spec.layout)]
                lines.append(document.line)
            except Unfit as bad:
                rejects.append(Reject(document.line, bad.reason, bad.hint))
        ids, lengths, mask = self._spans.encode([draft.text for draft in drafts], [draft.spans for draft in drafts])
        ids, lengths, mask = _close(ids, lengths, mask, tokenizer.eod_id, [draft.learn_end for draft in drafts])
        encoded = Encoded(ids, lengths, mask.view(np.uint8), rejects)
        sizes = np.array([self._size(draft.text) for draft in drafts], np.int64)
        if self.spec.max_tokens is not None:
            sizes = self._shorten(encoded, lines, sizes)
        encoded.bytes = int(sizes.sum())
        return encoded

    def _size(self, text: str) -> int:
        """Bytes of a text without the end-of-document token, if it ends with it."""
        return len(text.removesuffix(self._end).encode())

    def _draft(self, conversation: Conversation) -> _Draft:
        if not self._template.takes_parts and any(type(m.get("content")) is list for m in conversation.messages):
            conversation = replace(conversation, messages=[_joined(message) for message in conversation.messages])
        messages, tools, variables = conversation.messages, conversation.tools, conversation.variables
        text, spans = self._template.render(messages, tools, variables)
        if self.spec.train_on == "all":
            return _Draft(text, [(0, len(text))], True)
        learned = conversation.learned[-1:] if self.spec.train_on == "last" else conversation.learned
        if not self._template.text.marked:
            spans = [self._turn(conversation, number, text) for number in learned]
        else:
            turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
            if len(learned) < len(turns):
                if len(spans) == len(turns):
                    spans = [span for span, number in zip(spans, turns, strict=True) if number in learned]
                else:  # some turns have several marks, or none
                    ranges = [self._turn(conversation, number, text) for number in learned]
                    spans = [(a, b) for a, b in spans if any(start <= a and b <= end for start, end in ranges)]
        # What follows a closed turn is only white space: then the end-of-document token closes nothing.
        learn_end = learned[-1] == len(messages) - 1 and not text.rstrip().endswith(self._end)
        return _Draft(text, spans, learn_end)

    def _turn(self, conversation: Conversation, number: int, text: str) -> tuple[int, int]:
        """Where in the text the assistant's message `number` is: what it adds to the text before it, behind the turn's
        beginning, with its end-of-turn token. The model stops there: white space that follows is never its to write.

        Raises:
            Unfit: the text does not tell.
        """
        messages, tools, variables = conversation.messages, conversation.tools, conversation.variables
        try:
            before, _ = self._template.render(messages[:number], tools, variables, prompt=True)
            after = text
            if number + 1 < len(messages):
                after, _ = self._template.render(messages[: number + 1], tools, variables)
            start = len(before)
            if not (text.startswith(before) and after.startswith(before)):
                start = _opening(self._template.render(messages[:number], tools, variables)[0], before, text)
        except Unfit as bad:
            raise Unfit(f"the chat template cannot render what is before a turn ({bad}){MEND}") from None
        closed = after.rstrip()
        token = max((token for token in self._spans.added if closed.endswith(token)), key=len, default="")
        if text.startswith(after):
            end = len(closed) if token and len(closed) > (start or 0) else len(after)
        elif token and token not in json.dumps(messages[number], ensure_ascii=False, default=str):
            # Templates write reasoning in the last turns only: with more messages this turn reads differently. It still
            # ends with the same token.
            end = text.find(token, start) + len(token)
        else:
            end = 0
        if start is None or start > end:
            raise Unfit(f"the chat template writes a turn anew when others follow{MEND}")
        return start, end

    def _shorten(self, encoded: Encoded, lines: list[int | None], sizes: np.ndarray) -> np.ndarray:
        """Deal with documents that are too long.

        Args:
            lines: of the records that `encoded` holds.
            sizes: of the documents, in bytes; those of the documents that are left are returned.
        """
        limit, lengths = self.spec.max_tokens, encoded.lengths
        assert limit is not None
        assert encoded.mask is not None
        long = lengths > limit
        if not long.any():
            return sizes
        if self.spec.overlong == "keep":
            encoded.notes[f"longer than {limit:,} tokens, kept"] += int(long.sum())
            return sizes
        reason, bad = f"longer than {limit:,} tokens", long
        stays = np.ones(len(encoded.ids), bool)
        if self.spec.overlong == "truncate":
            reason, bad = f"nothing to learn within {limit:,} tokens", np.zeros(len(long), bool)
            ends = np.cumsum(lengths)
            for number in np.flatnonzero(long).tolist():
                start, end = int(ends[number] - lengths[number]), int(ends[number])
                stays[start + limit - 1 : end - 1] = False
                encoded.mask[end - 1] = 0  # the end-of-document token stays, but no longer ends an answer
                bad[number] = not encoded.mask[start : start + limit - 1].any()
                sizes[number] = len(self.open().decode(encoded.ids[start : start + limit - 1].tolist()).encode())
        each = 2 if self.kind == "preferences" else 1  # a pair is left out as one
        left = np.repeat(bad.reshape(-1, each).any(axis=1), each)
        out = np.flatnonzero(left[::each]).tolist()
        encoded.rejects += [Reject(lines[number], reason, on_purpose=True) for number in out]
        stays &= ~np.repeat(left, lengths)
        encoded.ids, encoded.mask = encoded.ids[stays], encoded.mask[stays]
        encoded.lengths = np.minimum(lengths, limit)[~left]
        if self.spec.overlong == "truncate" and (long & ~left).any():
            encoded.notes[f"cut to {limit:,} tokens"] += int((long & ~left).sum())
        return sizes[~left]


def _opening(base: str, before: str, text: str) -> int | None:
    """Where a turn begins whose opening is not all in the text: some templates open it with reasoning to be filled in,
    which they leave out of what has been said. It is in the text by its first lines at least, or this is None.

    Args:
        base, before: the conversation before the turn, without and with the turn's opening.
    """
    if not (text.startswith(base) and before.startswith(base)):
        return None
    shared = 0
    for expected, found in zip(before[len(base) :], text[len(base) :], strict=False):
        if expected != found:
            break
        shared += 1
    return before.rfind("\n", len(base), len(base) + shared) + 1 or None


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """Text parts as one text, for templates that know nothing of parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": "".join(part["text"] for part in content)}


def _close(
    ids: np.ndarray, lengths: np.ndarray, mask: np.ndarray, eod_id: int, learned: list[bool]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Put the end-of-document token behind each document that does not end with it, learned or not."""
    ends = np.cumsum(lengths)
    last = np.full(len(lengths), -1, np.int64)
    last[lengths > 0] = ids[ends[lengths > 0] - 1]
    is_open = last != eod_id
    ids = np.insert(ids, ends[is_open], np.uint32(eod_id))
    mask = np.insert(mask, ends[is_open], np.array(learned, bool)[is_open])
    return ids, lengths + is_open, mask

"""Drops and truncates encoded conversations and preferences. A preference is an item of two documents."""

from __future__ import annotations

from typing import Literal

import numpy as np

from weft.data.documents import Reject
from weft.data.packing.encoder import Encoded
from weft.data.tokenizers.tokenizer import Tokenizer

EQUAL = "the chosen and the rejected answer are equal"
OTHER_PROMPT = "the prompt has other tokens before the chosen than before the rejected answer"


def drop_reasons(documents: int, limit: int | None) -> tuple[str, ...]:
    """Returns the reasons for which `Items` drops items.

    Args:
        documents: number of documents per item: 2 for preferences.
        limit: maximum number of tokens of an item; None: no limit.
    """
    tokens = () if limit is None else (f"longer than {limit:,} tokens", f"nothing to learn within {limit:,} tokens")
    return (*tokens, EQUAL, OTHER_PROMPT) if documents > 1 else tokens


class Items:
    """Encoded items: conversations, or preferences of two documents each. A dropped item becomes a Reject.

    Args:
        encoded: the encoded documents, with loss masks. The methods change it.
        lines: `Document.line` of each item.
        sizes: number of UTF-8 bytes of each document's text.
        documents: number of documents per item.

    Attributes:
        sizes: number of UTF-8 bytes of the text of each document that was not dropped.
    """

    def __init__(self, encoded: Encoded, lines: list[int | None], sizes: np.ndarray, documents: int):
        assert encoded.mask is not None
        self.encoded, self.mask, self.lines, self.sizes, self.each = encoded, encoded.mask, lines, sizes, documents

    def limit(self, limit: int, overlong: Literal["drop", "truncate", "keep"], tokenizer: Tokenizer) -> None:
        """Drops, truncates or keeps the items of more than `limit` tokens.

        Truncation keeps the beginning of a document. Both documents of a preference are truncated at the same position,
        so that their prompts stay equal. An item of which a document then has no learned token is dropped.
        """
        lengths = self.encoded.lengths.reshape(-1, self.each)
        long = lengths.sum(1) > limit
        if not long.any():
            return
        if overlong == "keep":
            self.encoded.notes[f"longer than {limit:,} tokens, kept"] += int(long.sum())
            return
        too_long, nothing_left = drop_reasons(1, limit)
        if overlong == "drop":
            self._drop(long, too_long)
            return
        # The largest position p for which min(a, p) + min(b, p) <= limit, or the limit of a single document.
        shorter = lengths.min(1) if self.each > 1 else np.zeros(len(lengths), np.int64)
        position = np.maximum(limit - shorter, limit // self.each)
        cut = np.where(long, position, lengths.max(1, initial=0))[:, None] < lengths
        empty = self._truncate(cut.reshape(-1), np.repeat(position, self.each), tokenizer)
        dropped = empty.reshape(-1, self.each).any(1)
        if (long & ~dropped).any():
            self.encoded.notes[f"truncated to {limit:,} tokens"] += int((long & ~dropped).sum())
        self._drop(dropped, nothing_left)

    def drop_bad_pairs(self) -> None:
        """Drops preferences with two equal answers, and those whose answers follow different tokens of the prompt.

        The prompt is the tokens before the first learned token. Its last characters can be merged with the first ones
        of an answer.
        """
        ends = np.cumsum(self.encoded.lengths)
        begins = ends - self.encoded.lengths
        equal, other = np.zeros((2, len(self.lines)), bool)
        for number in range(len(self.lines)):
            chosen, rejected = (slice(begins[n], ends[n]) for n in (2 * number, 2 * number + 1))
            a, b = self.encoded.ids[chosen], self.encoded.ids[rejected]
            first, second = (int(np.argmax(self.mask[one])) for one in (chosen, rejected))
            equal[number] = np.array_equal(a, b)
            other[number] = not np.array_equal(a[:first], b[:second])
        reasons = ((equal, EQUAL), (other & ~equal, OTHER_PROMPT))
        for number, (which, reason) in enumerate(reasons):
            left = ~reasons[0][0] if number else slice(None)  # without those that were dropped before
            self._drop(which[left], reason)

    def _truncate(self, cut: np.ndarray, position: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
        """Truncates documents to `position` tokens, of which the last is the end-of-document token.

        That token is not trained on, because it does not end the answer.

        Args:
            cut: which documents to truncate, bool `[documents]`.

        Returns:
            Which of the truncated documents have no learned token left, bool `[documents]`.
        """
        encoded, lengths = self.encoded, self.encoded.lengths
        keep, ends, empty = np.ones(len(encoded.ids), bool), np.cumsum(lengths), np.zeros(len(cut), bool)
        for number in np.flatnonzero(cut).tolist():
            start, end = int(ends[number] - lengths[number]), int(ends[number])
            stop = start + int(position[number]) - 1
            keep[stop : end - 1] = False
            self.mask[end - 1] = 0
            empty[number] = not self.mask[start:stop].any()
            self.sizes[number] = len(tokenizer.decode(encoded.ids[start:stop].tolist()).encode())
        encoded.ids, encoded.mask = encoded.ids[keep], self.mask[keep]
        self.mask, encoded.lengths = encoded.mask, np.where(cut, position, lengths)
        return empty

    def _drop(self, which: np.ndarray | np.bool_, reason: str) -> None:
        """Drops the items for which `which` (bool `[items]`) is true."""
        dropped = np.asarray(which)
        if not dropped.any():
            return
        encoded, documents = self.encoded, np.repeat(~dropped, self.each)
        encoded.rejects += [Reject(line, reason) for line, bad in zip(self.lines, dropped, strict=True) if bad]
        self.lines = [line for line, bad in zip(self.lines, dropped, strict=True) if not bad]
        tokens = np.repeat(documents, encoded.lengths)
        encoded.ids, encoded.mask = encoded.ids[tokens], self.mask[tokens]
        self.mask = encoded.mask
        encoded.lengths, self.sizes = encoded.lengths[documents], self.sizes[documents]
        encoded.fields = {name: values[documents] for name, values in encoded.fields.items()}

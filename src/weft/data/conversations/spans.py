"""Text with marked characters to ids with marked tokens.

`tokenizers` says which characters a token is of, and is slow. A byte-level token is its bytes, one for one: so where a
token begins follows from the bytes of those before it, and the ids can come from the fast encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import tokenizers
from tokenizers import pre_tokenizers

from weft.data.tokenizers.tokenizer import Tokenizer
from weft.headers import tokenizer_file

Spans = Sequence[tuple[int, int]]  # [start, end) in characters of a text


class SpanEncoder:
    """Ids of texts, and which of them come from given characters.

    Attributes:
        fast: whether ids come from the fast encoder, and places from the tokens' bytes.
        added: added token -> id, special tokens among them.
    """

    def __init__(self, tokenizer: Tokenizer, *, exact: bool = False):
        file = tokenizer_file(tokenizer.path)
        self._tokenizer = tokenizer
        self._reference = tokenizers.Tokenizer.from_file(str(file))
        self._reference.no_truncation()  # a file may hold what some run once set
        self._reference.no_padding()
        tokens = self._reference.get_added_tokens_decoder()
        self.added = {token.content: id for id, token in tokens.items()}
        self.fast = not exact and _is_bytes(orjson.loads(file.read_bytes()), list(tokens.values()))
        if self.fast:
            words = self._reference.get_vocab(with_added_tokens=False)
            self._bytes = np.zeros(max([*words.values(), *tokens, 0]) + 1, np.int64)  # of each token
            for token, id in words.items():
                self._bytes[id] = len(token)  # byte-level BPE spells each byte as one character
            for token, id in self.added.items():
                self._bytes[id] = len(token.encode())

    def encode(self, texts: Sequence[str], spans: Sequence[Spans]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The ids of texts, the same whatever texts come together.

        Args:
            spans: of each text, characters that are marked.

        Returns:
            All ids end to end uint32 `[tokens]`, how many are each text's int64 `[texts]`, and bool `[tokens]`: the
            tokens from the one that the first character of a span is in, to the one that the last begins in, as
            `transformers` marks the assistant's.
        """
        if not texts:
            return np.zeros(0, np.uint32), np.zeros(0, np.int64), np.zeros(0, bool)
        return self._encode_fast(texts, spans) if self.fast else self._encode_exactly(texts, spans)

    def _encode_exactly(
        self, texts: Sequence[str], spans: Sequence[Spans]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        encodings = self._reference.encode_batch(list(texts), add_special_tokens=False)
        ids = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        lengths = np.array([len(part) for part in ids], np.int64)
        marks = np.zeros(int(lengths.sum()), bool)
        offset = 0
        for encoding, text, places, length in zip(encodings, texts, spans, lengths.tolist(), strict=True):
            for start, end in places:
                first, last = _token(encoding, start, len(text), 1), _token(encoding, end - 1, -1, -1)
                if first is not None and last is not None:
                    marks[offset + first : offset + last + 1] = True
            offset += length
        return np.concatenate(ids), lengths, marks

    def _encode_fast(self, texts: Sequence[str], spans: Sequence[Spans]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids, lengths = self._tokenizer.encode_batch(texts)
        edges: list[int] = []  # of each span: the bytes at which its first and its last character begin
        sizes: list[int] = []  # of each text, in bytes
        total = 0
        for text, places in zip(texts, spans, strict=True):
            ascii = text.isascii()
            for start, end in places:
                if start < len(text) and end > 0:
                    for character in (start, min(end, len(text)) - 1):
                        edges.append(total + (character if ascii else len(text[:character].encode())))
            sizes.append(len(text) if ascii else len(text.encode()))
            total += sizes[-1]
        ends = np.cumsum(self._bytes[ids])  # in bytes, of each token
        text_ends = np.concatenate([[0], ends])[np.cumsum(lengths)]
        if not np.array_equal(text_ends, np.cumsum(sizes)):
            return self._encode_exactly(texts, spans)
        tokens = np.searchsorted(ends, np.array(edges, np.int64).reshape(-1, 2), side="right")
        steps = np.zeros(len(ids) + 1, np.int32)
        np.add.at(steps, tokens[:, 0], 1)
        np.add.at(steps, np.maximum(tokens[:, 1] + 1, tokens[:, 0]), -1)
        return ids, lengths, np.cumsum(steps[:-1]) > 0


def _token(encoding: tokenizers.Encoding, character: int, stop: int, step: int) -> int | None:
    """The token that a character is in; if it is in none (white space that the tokenizer drops), its neighbour's.

    `transformers` gives up the rest of the conversation at such a start, and marks all to the text's end at such an
    end, the user's words among it, as it does if the end is in the text's first token: there it is not followed.
    """
    while character != stop:
        token = encoding.char_to_token(character) if character >= 0 else None
        if token is not None:
            return token
        character += step
    return None


def _is_bytes(content: dict[str, Any], added: list[tokenizers.AddedToken]) -> bool:
    """Whether the tokens of every text are its bytes, in order, none left out and none put in."""
    if content.get("normalizer") is not None or content["model"].get("type") != "BPE":
        return False
    model = content["model"]
    if model.get("end_of_word_suffix") or model.get("continuing_subword_prefix") or model.get("byte_fallback"):
        return False
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return False  # such a token takes white space with it
    after = content.get("post_processor") or {}
    if any(step.get("trim_offsets") for step in after.get("processors", [after])):
        return False  # `tokenizers` then says that blanks at a token's ends are not of it
    steps = content.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    if not any(step.get("type") == "ByteLevel" for step in steps) or any(
        step.get("add_prefix_space") for step in steps
    ):
        return False
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # without one of them, that byte would vanish
    return set(alphabet) <= set(model["vocab"]) and all(_keeps_all(step) for step in steps)


def _keeps_all(step: dict[str, Any]) -> bool:
    kind = step.get("type")
    return (
        kind in ("ByteLevel", "Digits", "Punctuation", "Split") and str(step.get("behavior", "")).lower() != "removed"
    )

"""Tokenizes text with marked character spans, and computes which tokens belong to the spans.

The `tokenizers` library maps characters to tokens, but is slow. With a byte-level vocabulary, the position of a token
follows from the bytes of the tokens before it, so the fast encoder can compute the ids.
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
    """Encodes texts to ids, and maps character spans to tokens.

    Args:
        exact: whether to encode every text with the `tokenizers` library.

    Attributes:
        fast: whether `Tokenizer.encode_batch` encodes the texts, which is faster. Then the positions of tokens are
            computed from the tokens' bytes.
        added: id of each added token, including special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, exact: bool = False):
        file = tokenizer_file(tokenizer.path)
        self._tokenizer = tokenizer
        self._reference = tokenizers.Tokenizer.from_file(str(file))
        self._reference.no_truncation()  # tokenizer.json can contain these settings
        self._reference.no_padding()
        tokens = self._reference.get_added_tokens_decoder()
        self.added = {token.content: id for id, token in tokens.items()}
        self.fast = not exact and _is_byte_level(orjson.loads(file.read_bytes()), list(tokens.values()))
        if self.fast:
            words = self._reference.get_vocab(with_added_tokens=False)
            self._bytes = np.zeros(max([*words.values(), *tokens, 0]) + 1, np.int64)  # number of bytes of each id
            for token, id in words.items():
                self._bytes[id] = len(token)  # byte-level BPE spells each byte as one character
            for token, id in self.added.items():
                self._bytes[id] = len(token.encode())

    def encode(self, texts: Sequence[str], spans: Sequence[Spans]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Encodes texts. The ids of a text do not depend on the other texts.

        Args:
            spans: marked character spans of each text.

        Returns:
            The concatenated ids, uint32 `[tokens]`; the number of tokens of each text, int64 `[texts]`; and the mask of
            marked tokens, bool `[tokens]`. A span marks all tokens from the token of its first character to the token
            in which its last character begins, as in Transformers' assistant masks.
        """
        if not texts:
            return np.zeros(0, np.uint32), np.zeros(0, np.int64), np.zeros(0, bool)
        return self._encode_fast(texts, spans) if self.fast else self._encode_exactly(texts, spans)

    def _encode_exactly(
        self, texts: Sequence[str], spans: Sequence[Spans]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        encodings = self._reference.encode_batch(list(texts), add_special_tokens=False)
        ids = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        lengths = np.array([len(text_ids) for text_ids in ids], np.int64)
        marks = np.zeros(int(lengths.sum()), bool)
        offset = 0
        for encoding, text, text_spans, length in zip(encodings, texts, spans, lengths.tolist(), strict=True):
            for start, end in text_spans:
                first, last = _token(encoding, start, len(text), 1), _token(encoding, end - 1, -1, -1)
                if first is not None and last is not None:
                    marks[offset + first : offset + last + 1] = True
            offset += length
        return np.concatenate(ids), lengths, marks

    def _encode_fast(self, texts: Sequence[str], spans: Sequence[Spans]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids, lengths = self._tokenizer.encode_batch(texts)
        edges: list[int] = []  # first byte of the first and of the last character of each span
        sizes: list[int] = []  # bytes of each text
        total = 0
        for text, text_spans in zip(texts, spans, strict=True):
            ascii = text.isascii()
            for start, end in text_spans:
                if start < len(text) and end > 0:
                    for character in (start, min(end, len(text)) - 1):
                        edges.append(total + (character if ascii else len(text[:character].encode())))
            sizes.append(len(text) if ascii else len(text.encode()))
            total += sizes[-1]
        ends = np.cumsum(self._bytes[ids])  # end of each token, in bytes
        text_ends = np.concatenate([[0], ends])[np.cumsum(lengths)]
        if not np.array_equal(text_ends, np.cumsum(sizes)):
            return self._encode_exactly(texts, spans)
        tokens = np.searchsorted(ends, np.array(edges, np.int64).reshape(-1, 2), side="right")
        steps = np.zeros(len(ids) + 1, np.int32)
        np.add.at(steps, tokens[:, 0], 1)
        np.add.at(steps, np.maximum(tokens[:, 1] + 1, tokens[:, 0]), -1)
        return ids, lengths, np.cumsum(steps[:-1]) > 0


def _token(encoding: tokenizers.Encoding, character: int, stop: int, step: int) -> int | None:
    """Returns the index of the token that contains a character.

    If the tokenizer dropped this character, returns the token of the nearest kept character in the direction `step`.

    Transformers behaves differently: it ignores the rest of the conversation if a span begins with a dropped character,
    and marks everything up to the end of the text if a span ends with a dropped character or in the first token.

    Args:
        character: position of the character in the text.
        stop: position at which the search ends; at this position the result is None.
        step: direction of the search for a character that the tokenizer kept: 1 (forwards) or -1 (backwards).
    """
    while character != stop:
        token = encoding.char_to_token(character) if character >= 0 else None
        if token is not None:
            return token
        character += step
    return None


def _is_byte_level(content: dict[str, Any], added: list[tokenizers.AddedToken]) -> bool:
    """Whether the concatenated tokens of a text are always exactly the bytes of the text.

    Args:
        content: content of tokenizer.json.
        added: the added tokens.
    """
    if content.get("normalizer") is not None or content["model"].get("type") != "BPE":
        return False
    model = content["model"]
    if model.get("end_of_word_suffix") or model.get("continuing_subword_prefix") or model.get("byte_fallback"):
        return False
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return False  # such a token includes white space around it
    after = content.get("post_processor") or {}
    if any(step.get("trim_offsets") for step in after.get("processors", [after])):
        return False  # `tokenizers` then excludes white space at a token's ends
    steps = content.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    if not any(step.get("type") == "ByteLevel" for step in steps) or any(
        step.get("add_prefix_space") for step in steps
    ):
        return False
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # a byte without a token would be dropped
    return set(alphabet) <= set(model["vocab"]) and all(_keeps_all(step) for step in steps)


def _keeps_all(step: dict[str, Any]) -> bool:
    kind = step.get("type")
    return (
        kind in ("ByteLevel", "Digits", "Punctuation", "Split") and str(step.get("behavior", "")).lower() != "removed"
    )

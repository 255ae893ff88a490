"""Converts log-probabilities of tokens to the forms of OpenAI's API, with the raw bytes of each token."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from weft.data.tokenizers.tokenizer import Tokenizer
from weft.generation.stream import Piece

SMALLEST = -9999.0  # JSON has no infinity


def token_bytes(tokenizer: Tokenizer, id: int) -> bytes:
    """Returns the bytes of a token in a text. They can be a part of a character."""
    known = tokenizer.token_bytes
    if known is None:  # they depend on other tokens
        return tokenizer.decode([id]).encode()
    return known[id] if id < len(known) else b""


def token_text(tokenizer: Tokenizer, id: int) -> str:
    """Returns the text of a token. If its bytes are not UTF-8, this is `bytes:` and an escape for each byte."""
    raw = token_bytes(tokenizer, id)
    try:
        return raw.decode() if raw else f"token_id:{id}"  # the model has more ids than the tokenizer
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """Returns an entry for each token of a chat's answer, with its own list of most likely tokens."""

    def entry(id: int, logprob: float | None) -> dict[str, Any]:
        raw = list(token_bytes(tokenizer, id))
        return {"token": token_text(tokenizer, id), "logprob": _finite(logprob), "bytes": raw}

    return [
        entry(piece.token, piece.logprob) | {"top_logprobs": [entry(id, value) for id, value in piece.top]}
        for piece in pieces
        if piece.token is not None
    ]


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, SMALLEST)


class CompletionLogprobs:
    """Converts the log-probabilities of a choice of a completion, while the text is generated.

    Args:
        tokenizer: the model's tokenizer.
        offset: number of characters of the choice's text before the first token; negative: that many characters of
            the tokens are not part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0):
        self._tokenizer, self._offset = tokenizer, offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def convert(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns the value of `logprobs` for the next pieces. `text_offset` is where a token begins in the text."""
        found: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for piece in pieces:
            assert piece.token is not None
            found["tokens"].append(token_text(self._tokenizer, piece.token))
            found["token_logprobs"].append(_finite(piece.logprob))
            top = {token_text(self._tokenizer, id): _finite(value) for id, value in piece.top}
            found["top_logprobs"].append(None if piece.logprob is None else top)
            found["text_offset"].append(max(self._offset, 0))
            self._offset += len(self._decoder.decode(token_bytes(self._tokenizer, piece.token)))
        return found

"""Log-probabilities in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.data.tokenizers.tokenizer import Tokenizer
from weft.generation.stream import Piece


def _token(tokenizer: Tokenizer, id: int) -> tuple[str, list[int] | None]:
    """Returns the text of a token, and its bytes if they do not depend on other tokens."""
    known = tokenizer.token_bytes
    if known is None:
        return tokenizer.decode([id]), None
    data = known[id] if id < len(known) else b""
    return data.decode("utf-8", "replace"), list(data)


def chat_logprobs(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> dict[str, Any]:
    """Returns the value of `logprobs` of a choice of a chat completion."""

    def entry(id: int, logprob: float | None) -> dict[str, Any]:
        text, data = _token(tokenizer, id)
        return {"token": text, "logprob": logprob, "bytes": data}

    content = [
        entry(piece.token, piece.logprob) | {"top_logprobs": [entry(id, value) for id, value in piece.top]}
        for piece in pieces
        if piece.token is not None
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, pieces: Sequence[Piece], offset: int) -> dict[str, Any]:
    """Returns the value of `logprobs` of a choice of a completion.

    Args:
        offset: number of characters of the choice's text before the pieces.
    """
    found: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for piece in pieces:
        if piece.token is not None:
            found["tokens"].append(_token(tokenizer, piece.token)[0])
            found["token_logprobs"].append(piece.logprob)
            found["top_logprobs"].append({_token(tokenizer, id)[0]: value for id, value in piece.top})
            found["text_offset"].append(offset)
        offset += len(piece.text)
    return found

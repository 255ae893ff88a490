"""Computes bits per byte, a loss that is comparable across tokenizers."""

from __future__ import annotations

import math
from typing import NamedTuple


class BytesPerToken(NamedTuple):
    """The mean number of bytes of text per token in a store. End-of-document tokens are not counted.

    Attributes:
        mean: mean number of bytes per token.
        eod_id: id of the end-of-document token.
    """

    mean: float
    eod_id: int


def bytes_per_token(tokens: int, documents: int, size: int | None, eod_id: int) -> BytesPerToken | None:
    """Computes the bytes per token of a store in which each document ends with one end-of-document token.

    Args:
        tokens, documents: number of tokens and of documents in the store.
        size: size of the documents' text in bytes; None if unknown.
        eod_id: id of the end-of-document token.

    Returns:
        None if the size is unknown or there is no text.
    """
    return BytesPerToken(size / (tokens - documents), eod_id) if size and tokens > documents else None


def bits_per_byte(nats: float, size: float) -> float:
    """Converts the total loss of a text, in nats, to bits per byte. `size` is the size of the text in bytes."""
    return nats / math.log(2) / size

"""Bits per byte: a loss that can be compared between tokenizers."""

from __future__ import annotations

import math
from typing import NamedTuple


class BytesPerToken(NamedTuple):
    """How many bytes of text a store's tokens stand for.

    Attributes:
        mean: of all tokens but the end-of-document tokens, which stand for none.
    """

    mean: float
    eod_id: int


def bytes_per_token(tokens: int, documents: int, size: int | None, eod_id: int) -> BytesPerToken | None:
    """Of a store of so many bytes, of whose tokens one ends each document; None if the bytes are not known."""
    return BytesPerToken(size / (tokens - documents), eod_id) if size and tokens > documents else None


def bits_per_byte(nats: float, size: float) -> float:
    """The bits of tokens whose losses add up to `nats`, divided by the `size` in bytes of the text that they are."""
    return nats / math.log(2) / size

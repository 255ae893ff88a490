"""Bits per byte: a loss that is comparable across tokenizers."""

from __future__ import annotations

import math
from typing import NamedTuple


class BytesPerToken(NamedTuple):
    """The mean number of bytes of text per token of a store, excluding end-of-document tokens, which encode none."""

    mean: float
    eod_id: int


def bytes_per_token(tokens: int, documents: int, size: int | None, eod_id: int) -> BytesPerToken | None:
    """For a store whose documents, `size` bytes in all, each end with one `eod_id`; None if the size is unknown."""
    return BytesPerToken(size / (tokens - documents), eod_id) if size and tokens > documents else None


def bits_per_byte(nats: float, size: float) -> float:
    """Converts the summed loss in nats of a text of `size` bytes to bits per byte."""
    return nats / math.log(2) / size

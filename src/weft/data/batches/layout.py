"""The layout of a sample: extra fields that an objective declares, and sequences per sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Keys of every batch, each one value per token. An extra field cannot have one of these names.
TOKEN_KEYS = ("tokens", "labels", "weight", "positions", "segments")


@dataclass(frozen=True)
class Field:
    """An extra field of a batch, such as a reward, an image or reference log-probabilities.

    Attributes:
        seq_dim: the dimension of one sequence's value that has an entry for each token; None if there is none. In a
            batch, all dimensions come after the batch dimension.
        dtype: of the tensor, as NumPy names it.
    """

    seq_dim: int | None = None
    dtype: str = "float32"

    def convert(self, value: Any, seq: int, lead: tuple[int, ...]) -> np.ndarray:
        """Converts one sample's value to an array of this dtype, `[*lead, ...]`.

        Raises:
            ValueError: the value does not match the declaration.
        """
        array, wanted = np.asarray(value), np.dtype(self.dtype)
        if array.dtype.kind not in "biuf" or (wanted.kind in "biu" and array.dtype.kind == "f"):
            raise ValueError(f"must be {self.dtype}, and is {array.dtype}")
        if array.shape[: len(lead)] != lead:
            raise ValueError(f"has shape {array.shape}; its first dimension must be the sample's {lead[0]} sequences")
        inner = array.shape[len(lead) :]
        if self.seq_dim is not None and (len(inner) <= self.seq_dim or inner[self.seq_dim] != seq):
            raise ValueError(f"has shape {array.shape}; dimension {self.seq_dim + len(lead)} must have {seq} tokens")
        return array.astype(wanted)


@dataclass(frozen=True)
class Layout:
    """Contents of a sample.

    Attributes:
        fields: extra fields by name.
        sequences: sequences per sample, adjacent in a batch and never separated: 2 for a pair, more for a group.
        vocab_size: ids must be below it; None if unknown.
    """

    fields: Mapping[str, Field] = field(default_factory=dict)
    sequences: int = 1
    vocab_size: int | None = None

    @property
    def lead(self) -> tuple[int, ...]:
        """Dimensions of a sample before those of a sequence."""
        return (self.sequences,) if self.sequences > 1 else ()


PLAIN = Layout()

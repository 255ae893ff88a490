"""What a sample consists of beside its tokens: the fields that an objective declares, and how many sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Every batch has these; no field has one of their names.
PARTS = ("tokens", "labels", "weight", "positions", "segments")


@dataclass(frozen=True)
class Field:
    """One further field of a batch, such as a reward, an image or reference log-probabilities.

    Attributes:
        seq_dim: the dimension of one sequence's value that runs along its tokens; None: the value has no such
            dimension. In a batch, a dimension for the rows stands before all others.
        dtype: of the tensor, by NumPy's name.
    """

    seq_dim: int | None = None
    dtype: str = "float32"

    def convert(self, value: Any, seq: int, lead: tuple[int, ...]) -> np.ndarray:
        """One sample's value as an array of this dtype, `[*lead, ...]`.

        Raises:
            ValueError: it does not fit what is declared.
        """
        found, wanted = np.asarray(value), np.dtype(self.dtype)
        if found.dtype.kind not in "biuf" or (wanted.kind in "biu" and found.dtype.kind == "f"):
            raise ValueError(f"must be {self.dtype}, and is {found.dtype}")
        if found.shape[: len(lead)] != lead:
            raise ValueError(f"has shape {found.shape}; its first dimension must be the sample's {lead[0]} sequences")
        inner = found.shape[len(lead) :]
        if self.seq_dim is not None and (len(inner) <= self.seq_dim or inner[self.seq_dim] != seq):
            raise ValueError(f"has shape {found.shape}; dimension {self.seq_dim + len(lead)} must have {seq} tokens")
        return found.astype(wanted)


@dataclass(frozen=True)
class Layout:
    """What samples consist of.

    Attributes:
        fields: name -> field, beside the parts that every sample has.
        sequences: sequences of a sample: 2 for a pair, more for a group. They are adjacent rows of a batch, and stay
            together.
        vocab_size: ids of this size and more are refused; None: not known.
    """

    fields: Mapping[str, Field] = field(default_factory=dict)
    sequences: int = 1
    vocab_size: int | None = None

    @property
    def lead(self) -> tuple[int, ...]:
        """The dimensions of a sample that stand before those of a sequence."""
        return (self.sequences,) if self.sequences > 1 else ()


PLAIN = Layout()

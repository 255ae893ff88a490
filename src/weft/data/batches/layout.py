"""Defines the layout of samples: the extra fields that an objective declares, and the sequences per sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Keys of every batch, with one value per token. An extra field must have another name.
TOKEN_KEYS = ("tokens", "labels", "weight", "positions", "segments")


@dataclass(frozen=True)
class Field:
    """An extra field of a batch, such as a reward, an image or reference log-probabilities.

    Attributes:
        seq_dim: index of the dimension that has one entry per token; None if no dimension has. The index refers to the
            value of one sequence, without batch dimension.
        dtype: NumPy name of the dtype.
        per_document: whether each document has one number, such as a label or a reward. Samples have the document's
            number at each of its tokens, `[seq]`, or a single number for all documents of the sequence.
            `Batch.document_values` returns the numbers. Token stores can have such fields.
        choices: the values that are allowed; None: all.
    """

    seq_dim: int | None = None
    dtype: str = "float32"
    per_document: bool = False
    choices: tuple[float, ...] | None = None

    def __post_init__(self):
        if self.per_document:
            object.__setattr__(self, "seq_dim", 0)

    def convert(self, value: Any, seq: int, lead: tuple[int, ...]) -> np.ndarray:
        """Converts one sample's value of the field to an array `[*lead, ...]` of the declared dtype.

        Args:
            seq: number of tokens of the sample.
            lead: the leading dimensions of a sample's arrays (`Layout.lead`).

        Raises:
            ValueError: the value's shape or dtype does not match the declaration.
        """
        array, wanted = np.asarray(value), np.dtype(self.dtype)
        if array.dtype.kind not in "biuf" or (wanted.kind in "biu" and array.dtype.kind == "f"):
            raise ValueError(f"must be {self.dtype}, but is {array.dtype}")
        if array.shape[: len(lead)] != lead:
            raise ValueError(
                f"has shape {array.shape}; its first dimension must be {lead[0]}, the number of sequences per sample"
            )
        if self.per_document and array.ndim == len(lead):
            array = np.repeat(array[..., None], seq, -1)
        inner = array.shape[len(lead) :]
        if self.per_document and len(inner) != 1:
            raise ValueError(f"has shape {array.shape}; a document has one number, given at each of its tokens")
        if self.seq_dim is not None and (len(inner) <= self.seq_dim or inner[self.seq_dim] != seq):
            raise ValueError(f"has shape {array.shape}; dimension {self.seq_dim + len(lead)} must have {seq} tokens")
        self.check_choices(array)
        return array.astype(wanted)

    def check_choices(self, values: np.ndarray) -> None:
        """Raises ValueError if a value is not allowed (`choices`)."""
        if self.choices is not None and not (allowed := np.isin(values, self.choices)).all():
            known = " or ".join(f"{one:g}" for one in self.choices)
            raise ValueError(f"must be {known}, but is {values[~allowed].flat[0]:g}")

    def check_documents(self, array: np.ndarray, segments: np.ndarray | None) -> None:
        """Raises ValueError if a field with `per_document` has several values in a document.

        Args:
            array: values of the field, `[..., seq]`.
            segments: index of each token's document, `[..., seq]`; None if each sequence is one document.
        """
        if self.per_document:
            changes = array[..., 1:] != array[..., :-1]
            if segments is not None:
                changes &= segments[..., 1:] == segments[..., :-1]
            if changes.any():
                raise ValueError("has several values in a document; give the same value at each of its tokens")


@dataclass(frozen=True)
class Layout:
    """Declares what every sample contains.

    Attributes:
        fields: extra fields by name.
        sequences: number of sequences per sample: 2 for a pair, more for a group. The sequences are adjacent in a batch
            and never separated.
        vocab_size: size of the vocabulary; None if unknown. All ids must be less than the size.
        max_position_embeddings: size of a learned table of positions, and None without one. All positions must be less.
        weigh_documents: whether the weights of a document's tokens are divided by their sum (`Batch.weigh_documents`).
        separate_padding: whether padding on the right gets a segment of its own, as padding on the left always does, so
            that it does not count as tokens of the document.
        data: "preferences" if samples must consist of items of two documents, a chosen and a rejected answer.
        computed: names of the fields that are computed before training; token stores do not have them.
        last_tokens: whether the last token of each document is an input, too, without a label.
    """

    fields: Mapping[str, Field] = field(default_factory=dict)
    sequences: int = 1
    vocab_size: int | None = None
    weigh_documents: bool = False
    separate_padding: bool = False
    data: str = "text"
    computed: tuple[str, ...] = ()
    last_tokens: bool = False
    max_position_embeddings: int | None = None

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading dimensions of a sample's arrays: `(sequences,)`, or `()` if a sample is one sequence."""
        return (self.sequences,) if self.sequences > 1 else ()

    @property
    def whole_documents(self) -> bool:
        """Whether the objective needs complete documents, so that no document may be split over sequences."""
        per_document = any(field.per_document for field in self.fields.values())
        return per_document or self.last_tokens or self.data == "preferences"


PLAIN = Layout()

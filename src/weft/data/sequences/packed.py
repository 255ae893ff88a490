"""Defines the dataset of complete documents, packed into sequences by best fit or padded to one sequence each."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.data.sequences.packing_index import packing_index
from weft.data.stores.store import TokenStore
from weft.errors import UserError
from weft.formatting import counted
from weft.observe.console import Console


class PackedDataset:
    """A dataset of packed sequences of complete documents (Ding et al., 2024).

    Attention is limited to documents. Only documents longer than a sequence are split, into slices. A document of n
    tokens has n - 1 inputs, each with the next token as its label. Every token except the document's first is a label
    exactly once per epoch, even where a document is split. Documents of one token have no labels and are left out.

    A sample has `segments` (the index of each token's document in the sequence; padding has the next index), and
    `positions` that restart at each document or slice of a document. Padding is the end-of-document token, with
    weight 0.

    Args:
        store: a store of texts or conversations. The weight of a label is its token's loss mask, or 1 without a mask.
        sequence_length: number of inputs per sample.
        pad: whether each sequence has only one document, or one slice of a document, and padding.
        console: shows the progress of building the index, and then the text of `describe`.

    Attributes:
        inputs: number of tokens in all samples, without padding.
        efficiency: fraction of the tokens of all samples that are not padding, 0 .. 1.
        unlearnable: number of documents of at most one token.

    Raises:
        UserError: the store has no labels or contains preference pairs, or the index cannot be written.
    """

    complete = True

    def __init__(self, store: TokenStore, sequence_length: int, *, pad: bool = False, console: Console | None = None):
        if store.info.kind == "preferences":
            raise UserError(
                "preference pairs cannot be packed into sequences; use a store of texts or conversations",
                store.path,
            )
        self.store, self.length = store, sequence_length
        self.index = packing_index(store, sequence_length, console, "pad" if pad else "best_fit")
        self.samples, self.inputs, self.unlearnable = self.index.sequences, self.index.inputs, self.index.unlearnable
        if self.samples < 1:
            raise UserError(
                "no document has two or more tokens, so there is nothing to learn; pack more text", store.path
            )
        self.efficiency = self.inputs / (self.samples * sequence_length)
        if console is not None:
            console.line(self.describe())

    def describe(self) -> str:
        """Returns a summary of the packing in one line."""
        left_out = f", {self.unlearnable:,} of one token left out" if self.unlearnable else ""
        return (
            f"{self.store.path}: {counted(self.store.num_documents, 'document')}{left_out}, packed into "
            f"{counted(self.samples, 'sequence')} of {self.length:,}, {1 - self.efficiency:.2%} padding"
        )

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        store, length = self.store, self.length
        documents, sizes, slice_ = self.index.documents_of(index, length)
        first = store.offsets[documents] // store.tokens.dtype.itemsize
        # A document's remainder is its end, after its full-length slices.
        first = first + (store.lengths[documents] - 1 - sizes if slice_ < 0 else slice_ * length)
        ends = np.cumsum(sizes)
        begins, filled = ends - sizes, int(ends[-1])
        places = np.arange(length, dtype=np.int64)
        segments = np.full(length, len(sizes), np.int64)
        segments[:filled] = np.repeat(np.arange(len(sizes)), sizes)
        positions = places - np.append(begins, filled)[segments]
        source = np.repeat(first - begins, sizes) + places[:filled]  # position of each input in the store
        tokens, labels = np.full((2, length), store.info.eod_id, np.int64)
        tokens[:filled], labels[:filled] = store.tokens[source], store.tokens[source + 1]
        weight = np.zeros(length, np.float32)
        weight[:filled] = 1 if store.loss_mask is None else store.loss_mask[source + 1]
        return {"tokens": tokens, "labels": labels, "weight": weight, "positions": positions, "segments": segments}

    def where(self, index: int) -> str:
        """Describes the origin of a sample, for messages."""
        documents, _, _ = self.index.documents_of(index, self.length)
        return f"document {int(documents[0]):,} of {self.store.path} (packed sequence {index:,})"

"""A token store as samples of whole documents, packed by best fit, each kept to itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.data.sequences.packing_index import packing_index
from weft.data.stores.store import TokenStore
from weft.errors import UserError
from weft.formatting import counted
from weft.observe.console import Console


class PackedDataset:
    """Sequences of whole documents (Ding et al., 2024); only those longer than a sequence are cut.

    A document of n tokens gives n - 1 inputs, each with the token after it as its label: every token but the document's
    first is learned exactly once an epoch, also where a cut is, and no input is spent on a last token. Documents of one
    token have nothing to learn and are left out. A sample has `segments` (the document's number within the sequence;
    padding has the next) and `positions` that begin anew with each document or piece. Padding is the end-of-document
    token, with weight 0.

    Args:
        store: of texts or conversations; a label's weight is the loss mask of that label's token, or 1.
        sequence_length: inputs of a sample.
        console: shows how the index is made, the first time, and then `describe`.

    Attributes:
        inputs: tokens in all samples that are no padding.
        efficiency: their share of all, in 0 .. 1.
        unlearnable: documents of at most one token.

    Raises:
        UserError: nothing to learn in the store, preference pairs, or no room for the index.
    """

    complete = True

    def __init__(self, store: TokenStore, sequence_length: int, *, console: Console | None = None):
        if store.info.kind == "preferences":
            raise UserError(
                "holds pairs of answers, which are not packed into sequences; name a store of texts or conversations",
                store.path,
            )
        self.store, self.length = store, sequence_length
        self.index = packing_index(store, sequence_length, console)
        self.samples, self.inputs, self.unlearnable = self.index.sequences, self.index.inputs, self.index.unlearnable
        if self.samples < 1:
            raise UserError("no document of two tokens or more: there is nothing to learn; pack more text", store.path)
        self.efficiency = self.inputs / (self.samples * sequence_length)
        if console is not None:
            console.line(self.describe())

    def describe(self) -> str:
        """What was packed, in a line."""
        left_out = f", {self.unlearnable:,} of one token left out" if self.unlearnable else ""
        return (
            f"{self.store.path}: {counted(self.store.num_documents, 'document')}{left_out}, packed into "
            f"{counted(self.samples, 'sequence')} of {self.length:,}, {1 - self.efficiency:.2%} padding"
        )

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        store, length = self.store, self.length
        documents, sizes, piece = self.index.documents_of(index, length)
        first = store.offsets[documents] // store.tokens.dtype.itemsize
        # A rest is the end of its document; only full pieces lie further to the front.
        first = first + (store.lengths[documents] - 1 - sizes if piece < 0 else piece * length)
        ends = np.cumsum(sizes)
        begins, filled = ends - sizes, int(ends[-1])
        places = np.arange(length, dtype=np.int64)
        segments = np.full(length, len(sizes), np.int64)
        segments[:filled] = np.repeat(np.arange(len(sizes)), sizes)
        positions = places - np.append(begins, filled)[segments]
        source = np.repeat(first - begins, sizes) + places[:filled]  # where each input is in the store
        tokens, labels = np.full((2, length), store.info.eod_id, np.int64)
        tokens[:filled], labels[:filled] = store.tokens[source], store.tokens[source + 1]
        weight = np.zeros(length, np.float32)
        weight[:filled] = 1 if store.loss_mask is None else store.loss_mask[source + 1]
        return {"tokens": tokens, "labels": labels, "weight": weight, "positions": positions, "segments": segments}

    def where(self, index: int) -> str:
        """Where a sample comes from, in words."""
        documents, _, _ = self.index.documents_of(index, self.length)
        return f"document {int(documents[0]):,} of {self.store.path} (packed sequence {index:,})"

"""Defines the dataset of complete documents, packed into sequences by best fit or padded to one sequence each."""

from __future__ import annotations

from collections.abc import Mapping
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

    A preference pair is never split over sequences: its chosen answer is the document with an even index 2k in
    `segments`, and its rejected answer has the index 2k + 1. Pairs longer than a sequence, and pairs of which an answer
    has no learned token, are left out. The same holds for each document if the samples have values per document, or
    `last_tokens`.

    Args:
        store: a token store. The weight of a label is its token's loss mask, or 1 without a mask.
        sequence_length: number of inputs per sample.
        pad: whether each sequence has only one document (or slice of a document, or pair), and padding.
        last_tokens: whether a document of n tokens has n inputs, the last one without a label. Then documents are not
            split.
        values: name -> value of each document of the store `[documents]`. The samples have each value at the tokens of
            its document; see `Field.per_document`.
        console: shows the progress of building the index, and then the text of `describe`.

    Attributes:
        inputs: number of tokens in all samples, without padding.
        efficiency: fraction of the tokens of all samples that are not padding, 0 .. 1.
        unlearnable: number of documents of at most one token. If documents are not split: number of items (documents,
            or pairs) with a document without a learned token.
        too_long: number of items longer than a sequence; 0 if documents are split.

    Raises:
        UserError: the store has no labels, no item fits, or the index cannot be written.
    """

    complete = True

    def __init__(
        self,
        store: TokenStore,
        sequence_length: int,
        *,
        pad: bool = False,
        last_tokens: bool = False,
        values: Mapping[str, np.ndarray] | None = None,
        console: Console | None = None,
    ):
        self.store, self.length, self.values = store, sequence_length, dict(values or {})
        self.pairs, self.last_tokens = store.info.kind == "preferences", last_tokens
        whole, method = self.pairs or bool(self.values) or last_tokens, "pad" if pad else "best_fit"
        self.index = packing_index(store, sequence_length, console, method, whole=whole, last_tokens=last_tokens)
        self.samples, self.inputs, self.unlearnable = self.index.sequences, self.index.inputs, self.index.unlearnable
        self.too_long, self.whole = self.index.too_long, whole
        if self.samples < 1 and whole:
            noun, left_out = "preference pair" if self.pairs else "document", self._left_out()
            raise UserError(
                f"no {noun} has a learned token and fits into a sequence of {sequence_length:,} tokens{left_out}; "
                "raise data.sequence_length, or pack more data",
                store.path,
            )
        if self.samples < 1:
            raise UserError(
                "no document has two or more tokens, so there is nothing to learn; pack more text", store.path
            )
        self.efficiency = self.inputs / (self.samples * sequence_length)
        if console is not None:
            console.line(self.describe())

    def describe(self) -> str:
        """Returns a summary of the packing in one line."""
        noun = "preference pair" if self.pairs else "document"
        return (
            f"{self.store.path}: {counted(self.index.documents, noun)}{self._left_out()}, packed into "
            f"{counted(self.samples, 'sequence')} of {self.length:,}, {1 - self.efficiency:.2%} padding"
        )

    def _left_out(self) -> str:
        unlearnable = "without learned tokens" if self.whole else "of one token"
        if self.pairs:
            unlearnable = "with an answer without learned tokens"
        found = {f"longer than {self.length:,} tokens": self.too_long, unlearnable: self.unlearnable}
        return "".join(f", {number:,} {reason} left out" for reason, number in found.items() if number)

    def __len__(self) -> int:
        return self.samples

    def documents(self, index: int) -> np.ndarray:
        """Returns the indices in the store of the documents of a sample, in order, int64 `[documents]`.

        The document at position `d` has the index `d` in the sample's `segments`.
        """
        return self._contents(index)[0]

    def _contents(self, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Returns the documents of a sample, the number of inputs of each, and the index of the slice or -1."""
        items, sizes, slice_ = self.index.items_of(index, self.length)
        documents = items.astype(np.int64)
        if self.pairs:
            documents = (2 * documents[:, None] + np.arange(2)).reshape(-1)
        if self.pairs or self.last_tokens:
            sizes = self.store.lengths[documents].astype(np.int64) - 1 + self.last_tokens
        return documents, sizes, slice_

    def __getitem__(self, index: int) -> dict[str, Any]:
        store, length = self.store, self.length
        documents, sizes, slice_ = self._contents(index)
        first = store.offsets[documents] // store.tokens.dtype.itemsize
        # A document's remainder is its end, after its full-length slices.
        first = first + (np.maximum(store.lengths[documents] - 1 - sizes, 0) if slice_ < 0 else slice_ * length)
        ends = np.cumsum(sizes)
        begins, filled = ends - sizes, int(ends[-1])
        places = np.arange(length, dtype=np.int64)
        segments = np.full(length, len(sizes), np.int64)
        segments[:filled] = np.repeat(np.arange(len(sizes)), sizes)
        positions = places - np.append(begins, filled)[segments]
        source = np.repeat(first - begins, sizes) + places[:filled]  # position of each input in the store
        tokens, labels = np.full((2, length), store.info.eod_id, np.int64)
        following = np.minimum(source + 1, len(store.tokens) - 1)
        tokens[:filled], labels[:filled] = store.tokens[source], store.tokens[following]
        weight = np.zeros(length, np.float32)
        weight[:filled] = 1 if store.loss_mask is None else store.loss_mask[following]
        if self.last_tokens:
            weight[ends - 1] = 0  # the label is the next document's first token
        sample = {"tokens": tokens, "labels": labels, "weight": weight, "positions": positions, "segments": segments}
        for name, values in self.values.items():
            sample[name] = np.zeros(length, values.dtype)  # of padding too
            sample[name][:filled] = values[documents][segments[:filled]]
        return sample

    def where(self, index: int) -> str:
        """Describes the origin of a sample, for messages."""
        return f"document {int(self.documents(index)[0]):,} of {self.store.path} (packed sequence {index:,})"

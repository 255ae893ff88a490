"""Defines `Batch`, the sequences of a global batch that one rank processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from weft.data.batches.layout import PLAIN, TOKEN_KEYS, Field, Layout


@dataclass
class Batch:
    """The sequences of a global batch that one rank processes.

    Attributes:
        tokens: token ids, int64 `[batch, seq]`.
        labels: ids of the tokens to predict, int64 `[batch, seq]`.
        positions: position of each token in its document or sequence, int64 `[batch, seq]`.
        weight: weight of each label in the loss, float32 `[batch, seq]`; 0 for labels without loss and for padding.
            float64 after `weigh_documents`.
        segments: index of each token's document in its sequence, int64 `[batch, seq]`; None if attention is not limited
            to documents.
        samples: for each sequence, the index of its sample in the run, counted over all epochs, int64 `[batch]`; -1 for
            padding. The sequences of one sample are adjacent.
        extra: values of the fields that the objective declares, each `[batch, ...]`.
        layout: the fields that the objective declares, and the number of sequences per sample.
        share: fraction of each sequence's tokens on this rank: 1, or 1 / cp with context parallelism.
        sum_over_ranks: function that sums a tensor over the ranks among which these sequences are sharded; None without
            context parallelism.
        local_segments: with context parallelism, `segments` of this rank's tokens only, because `segments` itself
            covers the full sequences.
        documents: number of columns of tensors with one value per document: the largest index in `segments`, plus 1.
            Slices of a batch keep the number.

    Raises:
        ValueError: `segments` has a negative index.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    weight: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor | None
    samples: torch.Tensor
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    layout: Layout = PLAIN
    share: float = 1.0
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None
    local_segments: torch.Tensor | None = None
    documents: int = 0

    def __post_init__(self):
        if not self.documents:  # a new batch, on the CPU; its slices and copies on a device keep the number
            self.documents = 1 if self.segments is None else int(self.segments.max()) + 1
            if self.segments is not None and self.segments.min() < 0:
                raise ValueError("segments must be 0 or more")

    # ---- for objectives

    @property
    def sequence_weight(self) -> torch.Tensor:
        """The weight of each sequence in a sum over sequences, float64 `[batch]`: 1, or 0 for padding.

        With context parallelism the weight is 1 / cp on each of the `cp` ranks that process the sequence.
        """
        return (self.samples >= 0).to(torch.float64) * self.share

    def sum_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `values` `[batch, seq]` over all tokens of each sequence, `[batch]`.

        With context parallelism, this includes the tokens on other ranks, and all ranks get the same sum. Objectives
        must multiply the result by `sequence_weight`, so that each sequence counts once. Differentiable.
        """
        total = values.sum(1)
        return total if self.sum_over_ranks is None else self.sum_over_ranks(total)

    def document_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `values` `[batch, seq]` over the tokens of each document, float64 `[batch, documents]`.

        Column `d` is the document whose tokens have index `d` in `segments`; without `segments`, a sequence is one
        document. Padding may have a column, too: see `learned_documents`.

        With context parallelism, this includes the tokens on other ranks, and all ranks get the same sums. Objectives
        must multiply what they compute of a document by `share`, so that each document counts once. Differentiable.
        """
        values, segments = values.to(torch.float64), self._segments
        if segments is None:
            sums = values.sum(1, keepdim=True)
        else:
            rows = torch.arange(len(values), device=values.device).unsqueeze(1)
            keys = (rows * self.documents + segments).flatten()
            # index_add of one dimension has a deterministic implementation on GPUs.
            sums = values.new_zeros(len(values) * self.documents).index_add(0, keys, values.flatten())
            sums = sums.view(-1, self.documents)
        return sums if self.sum_over_ranks is None else self.sum_over_ranks(sums)

    def document_values(self, name: str) -> torch.Tensor:
        """Returns the value that each document has in the field `name`, float64 `[batch, documents]`.

        The objective must declare the field with `Field(per_document=True)`, so that `extra[name]` is the document's
        value at each of its tokens. Columns without tokens are 0. Values of a field of dtype float64 can have a
        rounding error, because the result is a mean over the document's tokens; those of float32 are exact.
        """
        values = self.extra[name]
        # float64 has room for the sum of 2 ** 29 equal float32 numbers.
        return self.document_sums(values) / self.document_sums(torch.ones_like(values)).clamp(min=1)

    @property
    def learned_documents(self) -> torch.Tensor:
        """Whether each document has a token with loss, bool `[batch, documents]`. False for padding."""
        return self.document_sums(self.weight > 0) > 0

    def unpaired_row(self) -> int | None:
        """Returns the first sequence with an answer whose pair has no token with loss; None if there is none.

        Only for data of preferences (`Layout.data`), whose items are pairs of documents.
        """
        if self.layout.data != "preferences":
            return None
        learned = self.by_item(self.learned_documents)
        rows = (learned.any(-1) != learned.all(-1)).any(-1).nonzero()
        return int(rows[0, 0]) if len(rows) else None

    def at_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the value of each token's document, `[batch, seq]`. `values` is `[batch, documents]`."""
        segments = self._segments
        return values.expand(-1, self.tokens.shape[1]) if segments is None else values.gather(1, segments)

    def by_item(self, values: torch.Tensor, n: int = 2) -> torch.Tensor:
        """Reshapes `values` from `[batch, documents]` to `[batch, items, n]`. An item is `n` adjacent documents.

        Item `k` is the documents `n * k` to `n * k + n - 1` of the sequence. If the number of columns is not a multiple
        of `n`, columns of 0 (False) are appended.
        """
        return torch.nn.functional.pad(values, (0, -values.shape[1] % n)).unflatten(1, (-1, n))

    @property
    def _segments(self) -> torch.Tensor | None:
        return self.segments if self.local_segments is None else self.local_segments

    def by_sample(self, values: torch.Tensor) -> torch.Tensor:
        """Reshapes `values` from `[batch, ...]` to `[samples, sequences per sample, ...]`."""
        return values.unflatten(0, (-1, self.layout.sequences))

    # ---- for the training loop

    def with_following(self, count: int) -> Batch:
        """Returns the batch with the fields of multi-token prediction, each `[batch, seq, count]`.

        Column k - 1 is about the k-th token after each token: `next_tokens` is this token, `next_labels` its label, and
        `next_weight` the label's weight. The weight is 0 if the k-th token is in another document, or beyond the end of
        the sequence. The batch must have full sequences, not shards.
        """
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)

        def ahead(values: torch.Tensor) -> torch.Tensor:
            return torch.stack([values.roll(-k, 1) for k in range(1, count + 1)], -1)

        inside = torch.stack([places + k < len(places) for k in range(1, count + 1)], -1)
        if self.segments is not None:
            inside = inside & (ahead(self.segments) == self.segments.unsqueeze(-1))
        found = {"tokens": self.tokens, "labels": self.labels, "weight": self.weight}
        following = {f"next_{name}": ahead(values) for name, values in found.items()}
        following["next_weight"] = following["next_weight"] * inside
        fields = {name: Field(seq_dim=0, dtype=str(values.dtype)[6:]) for name, values in following.items()}
        layout = replace(self.layout, fields={**self.layout.fields, **fields})
        return replace(self, extra={**self.extra, **following}, layout=layout)

    def router_weights(self, shard: Batch) -> torch.Tensor:
        """Returns the model's input `loss_weights` (see `Decoder.forward`), before division by the step's weight.

        If attention is within documents, documents without a token with loss do not count; padding is such a document.
        The batch must have full sequences.

        Args:
            shard: this rank's tokens of the batch.
        """
        weights = self.weight.sum(1, dtype=torch.float64)
        if self.segments is None:
            return weights
        learned = self.learned_documents
        counted = self.at_tokens(learned).sum(1).clamp(min=1)
        return shard.at_tokens(learned) * (weights / counted).unsqueeze(1)

    def weigh_documents(self) -> Batch:
        """Returns the batch with weights that are divided by their sum over the document.

        So the weights of a document add up to 1, or to 0 if no token of the document has loss.
        """
        weight = self.weight.to(torch.float64)
        total = self.at_tokens(self.document_sums(weight))
        return replace(self, weight=weight / total.masked_fill(total == 0, 1.0))

    def split(self, size: int) -> list[Batch]:
        """Returns micro-batches of at most `size` sequences. `size` must be a multiple of the sequences per sample.

        The only micro-batch is the batch itself, not a copy.
        """
        if size >= len(self.tokens):
            return [self]
        return [self._map(lambda t, a=a: t[a : a + size]) for a in range(0, len(self.tokens), size)]

    def of_rank(self, rank: int, ranks: int) -> Batch:
        """Returns the sequences of data parallel rank `rank`, if this is the global batch.

        Each rank gets the same number of sequences, in order. Missing sequences are padding (see `pad`).
        """
        sequences = self.layout.sequences
        each = -(-len(self.tokens) // sequences // ranks) * sequences
        start, stop = min(rank * each, len(self.tokens)), min((rank + 1) * each, len(self.tokens))
        if start < stop:
            return self._map(lambda t: t[start:stop]).pad(each - (stop - start))
        return self._map(lambda t: t[:sequences]).pad(each)._map(lambda t: t[sequences:])

    def split_sequences(self, length: int) -> Batch:
        """Splits sequences into slices of `length` tokens, in order: `[batch x seq / length, length]`.

        If a slice begins within a document, that document's positions in the slice start at 0. Labels and weights do
        not change. The n-th slices of all sequences of a sample stay together as a shorter sample.

        Raises:
            ValueError: `length` does not divide the sequence length.
        """
        seq, sequences = self.tokens.shape[1], self.layout.sequences
        if length < 1 or seq % length:
            raise ValueError(f"sequences of {seq} tokens cannot be split into sequences of {length}")
        count = seq // length

        def slices(t: torch.Tensor, dim: int | None) -> torch.Tensor:
            if dim is None:
                t = t.unsqueeze(1).expand(-1, count, *t.shape[1:])
            else:
                t = t.unflatten(dim, (count, length)).movedim(dim, 1)
            return t.unflatten(0, (-1, sequences)).transpose(1, 2).flatten(0, 2)

        short = self.map_tokens(slices, lambda t: slices(t, None))
        in_first = torch.ones_like(short.tokens, dtype=torch.bool)
        if short.segments is not None:
            in_first = (short.segments != short.segments[:, :1]).cumsum(1) == 0  # in the slice's first document
        short.positions = torch.where(in_first, short.positions - short.positions[:, :1], short.positions)
        return short

    def pad(self, count: int) -> Batch:
        """Appends `count` sequences of weight 0. `count` must be a multiple of the sequences per sample."""
        sequences = self.layout.sequences
        copies = torch.arange(count, device=self.tokens.device) % sequences
        padded = self._map(lambda t: torch.cat((t, t[copies])))
        padded.weight[len(self.weight) :] = 0
        padded.samples[len(self.samples) :] = -1
        return padded

    def to(self, device: torch.device) -> Batch:
        """Returns a copy of the batch on another device."""
        return self._map(lambda t: t.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Returns a copy of the batch in page-locked memory, which is faster to copy to a GPU."""
        return self._map(torch.Tensor.pin_memory)

    def map_tokens(
        self,
        along: Callable[[torch.Tensor, int], torch.Tensor],
        others: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
    ) -> Batch:
        """Returns a batch in which every tensor is replaced by the result of a function.

        Args:
            along: function for tensors with one value per token; its arguments are the tensor and the index of the
                dimension of tokens.
            others: function for all other tensors; its argument is the tensor.
        """
        tensors = {name: getattr(self, name) for name in (*TOKEN_KEYS, "local_segments")}
        dims = {name: field.seq_dim for name, field in self.layout.fields.items()}
        return replace(
            self,
            **{name: None if t is None else along(t, 1) for name, t in tensors.items()},
            samples=others(self.samples),
            extra={
                name: others(t) if (dim := dims.get(name)) is None else along(t, dim + 1)
                for name, t in self.extra.items()
            },
        )

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        return self.map_tokens(lambda t, dim: function(t), function)

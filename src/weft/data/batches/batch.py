"""Defines `Batch`, the sequences of a global batch that one rank processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from weft.data.batches.layout import PLAIN, TOKEN_KEYS, Layout


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

    def sum_documents(self, values: torch.Tensor) -> torch.Tensor:
        """Returns for each token the sum of `values` `[batch, seq]` over the token's document, `[batch, seq]`.

        Without `segments`, a sequence is one document. The batch must have complete sequences: with context parallelism
        a shard does not have all tokens of a document.
        """
        if self.segments is None:
            return values.sum(1, keepdim=True).expand_as(values)
        first = self.segments.min()
        rows = torch.arange(len(values), device=values.device).unsqueeze(1)
        keys = rows * (self.segments.max() - first + 1) + self.segments - first  # differ between documents
        distinct, documents = keys.unique(return_inverse=True)
        return values.new_zeros(len(distinct)).index_add(0, documents.flatten(), values.flatten())[documents]

    def by_sample(self, values: torch.Tensor) -> torch.Tensor:
        """Reshapes `values` from `[batch, ...]` to `[samples, sequences per sample, ...]`."""
        return values.unflatten(0, (-1, self.layout.sequences))

    # ---- for the training loop

    def weigh_documents(self) -> Batch:
        """Returns the batch with weights that are divided by their sum over the document.

        So the weights of a document add up to 1, or to 0 if no token of the document has loss.
        """
        weight = self.weight.to(torch.float64)
        total = self.sum_documents(weight)
        return replace(self, weight=weight / total.masked_fill(total == 0, 1.0))

    def split(self, size: int) -> list[Batch]:
        """Returns micro-batches of at most `size` sequences. `size` must be a multiple of the sequences per sample."""
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
        tensors = {name: getattr(self, name) for name in TOKEN_KEYS}
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

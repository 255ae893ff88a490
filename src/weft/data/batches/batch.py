"""A batch: samples of a dataset, stacked to one rank's sequences of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from weft.data.batches.layout import PLAIN, TOKEN_KEYS, Layout


@dataclass
class Batch:
    """One rank's sequences of a global batch.

    Attributes:
        tokens, labels, positions: int64 `[batch, seq]`.
        weight: float32 `[batch, seq]`, weight of each label in the loss; 0 for labels without loss and for padding.
        segments: int64 `[batch, seq]`, the document of each token if attention is limited to documents; or None.
        samples: int64 `[batch]`, sample numbers over all epochs; -1 for padding. The sequences of one sample are
            adjacent.
        extra: fields that the objective declares, each `[batch, ...]`.
        layout: the fields, and the number of sequences per sample.
        share: fraction of each sequence's tokens on this rank: 1, or 1 / cp under context parallelism.
        sum_over_ranks: sums a tensor over the ranks that share these sequences; None without context parallelism.
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
        """Weight of each sequence in a sum over sequences, float64 `[batch]`: 1, or 0 for padding.

        Under context parallelism each rank that shares a sequence has the weight 1 / cp.
        """
        return (self.samples >= 0).to(torch.float64) * self.share

    def sum_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Sums `[batch, seq]` over all tokens of each sequence, on all its ranks: `[batch]`, equal on these ranks.

        Differentiable. Weight the result with `sequence_weight`, so that each sequence counts once.
        """
        total = values.sum(1)
        return total if self.sum_over_ranks is None else self.sum_over_ranks(total)

    def by_sample(self, values: torch.Tensor) -> torch.Tensor:
        """Reshapes `[batch, ...]` to `[samples, sequences, ...]`."""
        return values.unflatten(0, (-1, self.layout.sequences))

    # ---- for the training loop

    def split(self, size: int) -> list[Batch]:
        """Splits into micro-batches of at most `size` sequences, a multiple of the sequences per sample."""
        return [self._map(lambda t, a=a: t[a : a + size]) for a in range(0, len(self.tokens), size)]

    def split_sequences(self, length: int) -> Batch:
        """Splits sequences into shorter ones, in order: `[batch x seq / length, length]`.

        Positions restart at 0 in each sequence, for the document in which it begins. Labels and weights do not change.
        The n-th slices of a sample's sequences stay together as a shorter sample.

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
            in_first = (short.segments != short.segments[:, :1]).cumsum(1) == 0  # in the sequence's first document
        short.positions = torch.where(in_first, short.positions - short.positions[:, :1], short.positions)
        return short

    def pad(self, count: int) -> Batch:
        """Appends `count` sequences of weight 0, which are complete samples."""
        sequences = self.layout.sequences
        copies = torch.arange(count, device=self.tokens.device) % sequences
        padded = self._map(lambda t: torch.cat((t, t[copies])))
        padded.weight[len(self.weight) :] = 0
        padded.samples[len(self.samples) :] = -1
        return padded

    def to(self, device: torch.device) -> Batch:
        """Copies to another device."""
        return self._map(lambda t: t.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Copies to page-locked memory, for faster copies to a GPU."""
        return self._map(torch.Tensor.pin_memory)

    def map_tokens(
        self,
        along: Callable[[torch.Tensor, int], torch.Tensor],
        others: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
    ) -> Batch:
        """Maps every tensor: `along(tensor, dim)` for a tensor whose dimension `dim` is its tokens, else `others`."""
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

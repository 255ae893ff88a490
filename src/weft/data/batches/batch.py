"""What a step learns from: samples of a dataset, stacked to one rank's rows of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from weft.data.batches.layout import PARTS, PLAIN, Layout


@dataclass
class Batch:
    """One rank's rows of one global batch.

    Attributes:
        tokens, labels, positions: int64 `[rows, seq]`.
        weight: float32 `[rows, seq]`: how much each label counts; 0 where nothing is learned; padding rows are 0.
        segments: int64 `[rows, seq]`: which document a token is of, where attention keeps them apart; or None.
        samples: int64 `[rows]`: numbers of the samples over all epochs; -1 for padding. The sequences of one sample are
            adjacent rows.
        extra: the fields that the objective declares, each `[rows, ...]`.
        layout: which fields these are, and how many sequences a sample has.
        share: of each row's tokens, what this rank has: 1, or 1 / cp under context parallelism.
        add_up: sums a tensor over the ranks that have the other tokens of these rows; None: this rank has them all.
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
    add_up: Callable[[torch.Tensor], torch.Tensor] | None = None

    # ---- for objectives

    @property
    def sequence_weight(self) -> torch.Tensor:
        """How much each row counts in a sum over sequences, float64 `[rows]`: 1, and 0 for padding.

        Under context parallelism each of the ranks that share a row counts its part, 1 / cp.
        """
        return (self.samples >= 0).to(torch.float64) * self.share

    def sum_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Sums `[rows, seq]` over each row's tokens, wherever they are: `[rows]`, the same on all ranks of a row.

        Gradients flow back to every token. What follows counts once if it is weighted by `sequence_weight`.
        """
        total = values.sum(1)
        return total if self.add_up is None else self.add_up(total)

    def by_sample(self, values: torch.Tensor) -> torch.Tensor:
        """`[rows, ...]` as `[samples, sequences, ...]`."""
        return values.unflatten(0, (-1, self.layout.sequences))

    # ---- for the training loop

    def split(self, rows: int) -> list[Batch]:
        """Micro-batches of at most `rows` rows, a multiple of a sample's sequences."""
        return [self._map(lambda t, a=a: t[a : a + rows]) for a in range(0, len(self.tokens), rows)]

    def cut(self, length: int) -> Batch:
        """The same tokens in the same order, in shorter rows: `[rows x seq / length, length]`.

        Positions begin anew with each row: those of the document that it begins in. Labels and weights stay, a row's
        last label too. The n-th pieces of a sample's sequences stay together, as a shorter sample.

        Raises:
            ValueError: `length` does not divide the rows.
        """
        seq, sequences = self.tokens.shape[1], self.layout.sequences
        if length < 1 or seq % length:
            raise ValueError(f"rows of {seq} tokens cannot be cut into rows of {length}")
        each = seq // length

        def pieces(t: torch.Tensor, dim: int | None) -> torch.Tensor:
            if dim is None:
                t = t.unsqueeze(1).expand(-1, each, *t.shape[1:])
            else:
                t = t.unflatten(dim, (each, length)).movedim(dim, 1)
            return t.unflatten(0, (-1, sequences)).transpose(1, 2).flatten(0, 2)

        short = self.map_tokens(lambda t, dim: pieces(t, dim), lambda t: pieces(t, None))
        first = torch.ones_like(short.tokens, dtype=torch.bool)
        if short.segments is not None:
            first = (short.segments != short.segments[:, :1]).cumsum(1) == 0  # the row's first document
        short.positions = torch.where(first, short.positions - short.positions[:, :1], short.positions)
        return short

    def padded(self, rows: int) -> Batch:
        """With so many rows more, whole samples, which count for nothing."""
        sequences = self.layout.sequences
        copies = torch.arange(rows, device=self.tokens.device) % sequences
        more = self._map(lambda t: torch.cat((t, t[copies])))
        more.weight[len(self.weight) :] = 0
        more.samples[len(self.samples) :] = -1
        return more

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return self._map(lambda t: t.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The same in page-locked memory, from where a GPU copies faster."""
        return self._map(torch.Tensor.pin_memory)

    def map_tokens(
        self,
        along: Callable[[torch.Tensor, int], torch.Tensor],
        others: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
    ) -> Batch:
        """The same with every tensor changed: `along(tensor, dim)` where `dim` runs along tokens, else `others`."""
        parts = {name: getattr(self, name) for name in PARTS}
        dims = {name: field.seq_dim for name, field in self.layout.fields.items()}
        return replace(
            self,
            **{name: None if t is None else along(t, 1) for name, t in parts.items()},
            samples=others(self.samples),
            extra={
                name: others(t) if (dim := dims.get(name)) is None else along(t, dim + 1)
                for name, t in self.extra.items()
            },
        )

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        return self.map_tokens(lambda t, dim: function(t), function)

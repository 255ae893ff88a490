"""Next-token prediction: the objective of pretraining."""

from __future__ import annotations

from typing import Any

import torch

from weft.data.batches.batch import Batch


class Pretrain:
    """The cross-entropy of every token given the tokens before it. Padding and masked tokens have weight 0."""

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Returns the keyword arguments of the model's forward pass.

        Because `labels` is among them, the model returns the log-probability of each label instead of logits.
        """
        return {
            "tokens": batch.tokens,
            "positions": batch.positions,
            "segments": batch.segments,
            "labels": batch.labels,
        }

    def weight(self, batch: Batch) -> torch.Tensor:
        """Returns the batch's weight, a scalar: the number of tokens that are not masked."""
        return batch.weight.sum(dtype=torch.float64)

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns the loss in nats, summed over the tokens that are not masked.

        Args:
            outputs: log-probabilities of the labels, `[batch, seq]`.
            batch: the batch, whose `weight` masks tokens.
        """
        return -(outputs * batch.weight.to(outputs.dtype)).sum()

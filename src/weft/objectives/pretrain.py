"""Next-token prediction: the objective of pretraining."""

from __future__ import annotations

from typing import Any

import torch

from weft.data.batches.batch import Batch


class Pretrain:
    """Cross-entropy of every token given the tokens before it, weighted by `batch.weight`."""

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """The model's arguments; with `labels` it returns their log-probabilities `[batch, seq]` instead of logits."""
        return {
            "tokens": batch.tokens,
            "positions": batch.positions,
            "segments": batch.segments,
            "labels": batch.labels,
        }

    def weight(self, batch: Batch) -> torch.Tensor:
        """The batch's weight: its number of unmasked tokens, a scalar."""
        return batch.weight.sum(dtype=torch.float64)

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The loss in nats, summed over unmasked tokens. `outputs`: log-probabilities `[batch, seq]`."""
        return -(outputs * batch.weight.to(outputs.dtype)).sum()

"""Next-token prediction: the objective of pretraining."""

from __future__ import annotations

from typing import Any

import torch

from weft.data.batches.batch import Batch


class Pretrain:
    """Cross-entropy of every token given those before it; `batch.weight` says which tokens count, and how much."""

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """The model's arguments. With `labels` it returns their log-probabilities `[batch, seq]`, never full logits."""
        return {
            "tokens": batch.tokens,
            "positions": batch.positions,
            "segments": batch.segments,
            "labels": batch.labels,
        }

    def weight(self, batch: Batch) -> torch.Tensor:
        """How much the batch counts: its number of unmasked tokens. A scalar."""
        return batch.weight.sum(dtype=torch.float64)

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The sum, in nats, over the batch's unmasked tokens. `outputs`: log-probabilities `[batch, seq]`."""
        return -(outputs * batch.weight.to(outputs.dtype)).sum()

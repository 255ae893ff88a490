"""Next-token prediction: the objective of pretraining."""

from __future__ import annotations

import torch

from weft.data.batches.batch import Batch
from weft.parallel.objective import Objective


class Pretrain(Objective):
    """The cross-entropy of every token given the tokens before it. Padding and masked tokens have weight 0."""

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns the loss in nats, summed over the tokens that are not masked.

        Args:
            outputs: log-probabilities of the labels, `[batch, seq]`.
            batch: the batch, whose `weight` masks tokens.
        """
        return -(outputs * batch.weight.to(outputs.dtype)).sum()

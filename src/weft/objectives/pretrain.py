"""Next-token prediction: the objective of pretraining."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge

from weft.data.batches.batch import Batch
from weft.parallel.objective import Loss, Objective


class Pretrain(Objective):
    """The cross-entropy of every token given the tokens before it. Padding and masked tokens have weight 0.

    Args:
        z_loss: coefficient z of the auxiliary loss z log(Z)^2 of each learned token, where Z is the sum of the
            exponentials of the logits (PaLM; Chowdhery et al., 2022, use 1e-4); 0: no auxiliary loss. It keeps logits
            from drifting. The metric `z_loss` is its mean; `loss` and `validation_loss` are the cross-entropy alone.
    """

    z_loss = 0.0

    def __init__(self, *, z_loss: Annotated[float, Ge(0)] = 0.0):
        self.z_loss, self.normalizers = z_loss, z_loss > 0
        if z_loss:
            self.scalars = (*getattr(self, "scalars", ()), "z_loss")  # a subclass can have scalars

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor | Loss:
        """Returns the loss in nats, summed over the tokens that are not masked.

        Args:
            outputs: log-probabilities of the labels, `[batch, seq]`; with `z_loss` `[batch, seq, 2]`, log-probabilities
                and normalizers.
            batch: the batch, whose `weight` masks tokens.
        """
        weight = batch.weight.to(outputs.dtype)
        if not self.z_loss:
            return -(outputs * weight).sum()
        logprobs, normalizers = outputs.unbind(-1)
        auxiliary = self.z_loss * (normalizers.square() * weight).sum()
        # Added to the gradient only, like the auxiliary losses of experts.
        total = (auxiliary - auxiliary.detach()) - (logprobs * weight).sum()
        return Loss(total, {"z_loss": (auxiliary, weight.sum())})

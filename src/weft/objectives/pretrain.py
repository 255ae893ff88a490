"""Next-token prediction: the objective of pretraining."""

from __future__ import annotations

from typing import Annotated, Any

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
        mtp_loss_factor: factor of the auxiliary loss of multi-token prediction (`model.num_nextn_predict_layers`;
            DeepSeek-V3, 2024, used 0.3 and later 0.1). This loss is the mean over the layers of the sum of their
            cross-entropies, divided by the number of learned tokens, as `loss` is. A layer does not learn tokens that
            are masked or in another document. The metric `mtp_loss` is the mean cross-entropy of what the layers learn.
            0: the layers are not trained.
    """

    z_loss = mtp_loss_factor = 0.0

    def __init__(self, *, z_loss: Annotated[float, Ge(0)] = 0.0, mtp_loss_factor: Annotated[float, Ge(0)] = 0.1):
        self.z_loss, self.normalizers, self.mtp_loss_factor = z_loss, z_loss > 0, mtp_loss_factor
        names = {"z_loss": z_loss, "mtp_loss": mtp_loss_factor}
        self.scalars = (*getattr(self, "scalars", ()), *(name for name in names if names[name]))  # or of a subclass

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Returns the model's arguments; `next_tokens` and `next_labels` if the model has layers that predict them."""
        following = {name: batch.extra[name] for name in ("next_tokens", "next_labels") if name in batch.extra}
        return super().inputs(batch) | following

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor | Loss:
        """Returns the loss in nats, summed over the tokens that are not masked.

        Args:
            outputs: log-probabilities of the labels, `[batch, seq]`; with `z_loss` or multi-token prediction
                `[batch, seq, values]`: log-probabilities, normalizers (with `z_loss`), and log-probabilities of
                `next_labels`.
            batch: the batch, whose `weight` masks tokens.
        """
        weight, following = batch.weight.to(outputs.dtype), batch.extra.get("next_weight")
        columns = outputs.unsqueeze(-1) if outputs.dim() == 2 else outputs
        total, scalars = -(columns[..., 0] * weight).sum(), {}
        if self.z_loss:
            auxiliary = self.z_loss * (columns[..., 1].square() * weight).sum()
            scalars["z_loss"] = auxiliary, weight.sum()
            # Added to the gradient only, like the auxiliary losses of experts.
            total = total + (auxiliary - auxiliary.detach())
        if following is not None:
            layers, following = following.shape[-1], following.to(outputs.dtype)
            auxiliary = -(columns[..., -layers:] * following).sum()
            scalars["mtp_loss"] = auxiliary, following.sum()
            total = total + self.mtp_loss_factor / layers * (auxiliary - auxiliary.detach())
        return Loss(total, scalars) if scalars else total

"""Odds ratio preference optimization: fine-tuning and preferences in one loss, without a reference model."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Gt
from torch.nn.functional import logsigmoid

from weft.data.batches.batch import Batch
from weft.objectives.preference_pairs import (
    PAIR_SCALARS,
    answer_lengths,
    answer_logprobs,
    pair_scalars,
    pair_weights,
)
from weft.parallel.objective import Loss, Objective


class ORPO(Objective):
    """Odds ratio preference optimization (ORPO; Hong et al., 2024): fine-tuning and preferences in one loss.

    With p(y) = exp(log p(y | x) / |y|), the geometric mean of the probabilities of an answer's |y| tokens, and
    odds(y) = p(y) / (1 - p(y)), the loss of a pair is

        -log p(chosen) - beta log sigmoid(log(odds(chosen) / odds(rejected)))

    and the loss of a step is the mean over the pairs of the global batch. It trains a base model, without an SFT run
    before it and without a reference model. Metrics are those of `dpo` with the rewards beta log p(y), and `nll`, the
    first term.

    Args:
        beta: weight of the second term (lambda in the paper), such as 0.1.
    """

    data = "preferences"
    inherits_dropout = False
    scalars = (*PAIR_SCALARS, "nll")

    def __init__(self, *, beta: Annotated[float, Gt(0)] = 0.1):
        self.beta = beta

    def weight(self, batch: Batch) -> torch.Tensor:
        """Returns the number of pairs."""
        return pair_weights(batch).sum()

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        """Returns the loss, summed over pairs.

        Args:
            outputs: log-probabilities of the labels, `[batch, seq]`.
        """
        weights, sums = pair_weights(batch), answer_logprobs(outputs, batch)
        means = batch.by_item(sums / answer_lengths(batch))
        log_odds = means - log1mexp(means)
        preference = logsigmoid(log_odds[..., 0] - log_odds[..., 1])
        nll = -means[..., 0]
        scalars = pair_scalars(self.beta * means.detach(), weights, batch.by_item(sums.detach()))
        scalars["nll"] = ((nll.detach() * weights).sum(), weights.sum())
        return Loss(((nll - self.beta * preference) * weights).sum(), scalars)


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Returns log(1 - exp(x)) for x <= 0, without cancellation (Maechler, 2012). 0 counts as the largest number below.

    So answers with probability 1, and padding, have a finite result.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -0.6931471805599453  # -ln 2
    return torch.where(near, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))

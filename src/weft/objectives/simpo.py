"""Simple preference optimization, which needs no reference model."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch.nn.functional import logsigmoid

from weft.data.batches.batch import Batch
from weft.objectives.preference_pairs import PAIR_SCALARS, answer_lengths, answer_logprobs, pair_scalars, pair_weights
from weft.parallel.objective import Loss, Objective


class SimPO(Objective):
    """Simple preference optimization (SimPO; Meng et al., 2024): a margin between log-probabilities per token.

    The reward of an answer y of |y| tokens to a prompt x is r(y) = beta log p(y | x) / |y|. The loss of a pair is

        -log sigmoid(r(chosen) - r(rejected) - gamma)

    and the loss of a step is the mean over the pairs of the global batch. There is no reference model.

    Args:
        beta: scale of the rewards, such as 2.0 to 2.5, or 10 for some instruction-tuned models.
        gamma: target margin between the rewards; 0.3 to 0.8 times beta is usual.
    """

    data = "preferences"
    inherits_dropout = False
    scalars = PAIR_SCALARS

    def __init__(self, *, beta: Annotated[float, Gt(0)] = 2.0, gamma: Annotated[float, Ge(0)] = 1.0):
        self.beta, self.gamma = beta, gamma

    def weight(self, batch: Batch) -> torch.Tensor:
        """Returns the number of pairs."""
        return pair_weights(batch).sum()

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        """Returns the loss, summed over pairs.

        Args:
            outputs: log-probabilities of the labels, `[batch, seq]`.
        """
        weights, sums = pair_weights(batch), answer_logprobs(outputs, batch)
        rewards = self.beta * batch.by_item(sums / answer_lengths(batch))
        losses = -logsigmoid(rewards[..., 0] - rewards[..., 1] - self.gamma)
        return Loss((losses * weights).sum(), pair_scalars(rewards.detach(), weights, batch.by_item(sums.detach())))

"""Reward models: a scalar score of an answer, learned from preferences."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch.nn.functional import logsigmoid

from weft.data.batches.batch import Batch
from weft.data.batches.layout import Field
from weft.objectives.preference_pairs import PAIR_SCALARS, pair_scalars, pair_weights
from weft.parallel.objective import Loss, Objective


class Reward(Objective):
    """The Bradley-Terry loss of a reward model (Ouyang et al., 2022): the chosen answer's score is to be higher.

    The model needs `model.num_labels: 1`, a head with one output. The score r of an answer is this output at the last
    token of the document (prompt and answer). The loss of a pair is

        -log sigmoid(r(chosen) - r(rejected) - margin) + center (r(chosen) + r(rejected))^2

    and the loss of a step is the mean over the pairs of the global batch. Without `center`, the loss does not change if
    a constant is added to all scores; `center` keeps the scores near 0 (Eisenstein et al., 2023).

    Args:
        margin: whether records have the number `margin`, by which the scores of the pair are to differ (Touvron et al.,
            2023).
        center: weight of the second term, such as 0.01.
    """

    data = "preferences"
    inherits_dropout = False
    scalars = PAIR_SCALARS[:4]
    last_tokens = True

    def __init__(self, *, margin: bool = False, center: Annotated[float, Ge(0)] = 0.0):
        self.center, self.fields = center, {"margin": Field(per_document=True)} if margin else {}

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Returns the model's arguments, without labels: the model returns a score for each token."""
        return {name: getattr(batch, name) for name in ("tokens", "positions", "segments")}

    def weight(self, batch: Batch) -> torch.Tensor:
        """Returns the number of pairs."""
        return pair_weights(batch).sum()

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        """Returns the loss, summed over pairs.

        Args:
            outputs: scores, `[batch, seq]`.
        """
        weights, scores = pair_weights(batch), batch.by_item(document_scores(outputs, batch))
        margin = batch.by_item(batch.document_values("margin"))[..., 0] if self.fields else 0.0
        losses = -logsigmoid(scores[..., 0] - scores[..., 1] - margin) + self.center * scores.sum(-1).square()
        return Loss((losses * weights).sum(), pair_scalars(scores.detach(), weights))


def document_scores(scores: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Returns the score at the last token of each document, float64 `[batch, documents]`.

    Args:
        scores: the model's output for each token, `[batch, seq]`.
    """
    lengths = batch.document_sums(torch.ones_like(batch.weight))
    last = batch.positions + 1 == batch.at_tokens(lengths)
    return batch.document_sums(torch.where(last, scores.to(torch.float64), 0.0))

"""Direct preference optimization and its variants."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch.nn.functional import logsigmoid

from weft.data.batches.batch import Batch
from weft.errors import UserError
from weft.objectives.preference_pairs import PAIR_SCALARS, answer_lengths, answer_logprobs, pair_scalars, pair_weights
from weft.parallel.objective import Forward, Loss, Objective


class DPO(Objective):
    """Direct preference optimization (DPO; Rafailov et al., 2023): learns from pairs of a chosen and a rejected answer.

    The answers' log-ratios are log(p / p_ref), where p and p_ref are the probabilities that the model and the frozen
    reference model give to the answer's tokens after its prompt. The loss of a pair depends on d, the log-ratio of the
    chosen answer minus that of the rejected answer (see `loss`). The loss of a step is the mean over the pairs of the
    global batch.

    The reference runs without dropout. The model's own forward has dropout only if `model` or `adapter` in the run file
    sets a dropout probability, not if the checkpoint in `model.from` has one; leave them 0, so that the log-ratios are
    those of the model that is saved. Metrics: the mean `margin` between the rewards beta log(p / p_ref) of both
    answers, `accuracy` (fraction of pairs with a positive margin), both rewards, and both log-probabilities.

    Args:
        beta: strength of the constraint to stay near the reference, such as 0.1.
        loss: `sigmoid`: -log sigmoid(beta d). `ipo`: (d - 1 / (2 beta))^2 (Azar et al., 2023). `cdpo`: -(1 - e) log
            sigmoid(beta d) - e log sigmoid(-beta d), with e = `label_smoothing` (Mitchell, 2023). `robust`: (-(1 - e)
            log sigmoid(beta d) + e log sigmoid(-beta d)) / (1 - 2 e) (Chowdhury et al., 2024). `hinge`: max(0, 1 - beta
            d) (SLiC; Zhao et al., 2023).
        label_smoothing: for `cdpo` and `robust`, the assumed probability that the labels of a pair are swapped.
        length_normalized: whether log-probabilities are divided by the number of tokens of the answer. Default: only
            for `ipo`, as its authors did.
        reference: the reference model. `start`: the model with which the run starts, including a trained adapter that
            `adapter.from` names; or the path of a run, checkpoint or Hugging Face folder.
        cache_reference: whether the reference's log-probabilities of all answers are computed once before training, and
            kept in the cache folder. Then the reference is not in memory during training.
        sft_weight: weight of an additional loss, the negative log-probability per token of the chosen answer (RPO; Pang
            et al., 2024).
    """

    data = "preferences"
    inherits_dropout = False
    scalars = PAIR_SCALARS

    def __init__(
        self,
        *,
        beta: Annotated[float, Gt(0)] = 0.1,
        loss: Literal["sigmoid", "ipo", "cdpo", "robust", "hinge"] = "sigmoid",
        label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0,
        length_normalized: bool | None = None,
        reference: str = "start",
        cache_reference: bool = False,
        sft_weight: Annotated[float, Ge(0)] = 0.0,
    ):
        if (label_smoothing > 0) != (loss in ("cdpo", "robust")):
            what = "needs label_smoothing above 0" if loss in ("cdpo", "robust") else "has no label_smoothing"
            raise UserError(
                f"objective: the loss {loss} {what}; set label_smoothing, such as 0.1, with cdpo or robust only"
            )
        self.beta, self.kind, self.smoothing, self.sft_weight = beta, loss, label_smoothing, sft_weight
        self.mean = loss == "ipo" if length_normalized is None else length_normalized
        self.frozen_models = {"reference": reference}
        self.cached_logprobs = {"reference": "reference"} if cache_reference else {}

    def weight(self, batch: Batch) -> torch.Tensor:
        """Returns the number of pairs."""
        return pair_weights(batch).sum()

    def prepare(self, forward: Forward, batch: Batch) -> dict[str, Any]:
        """Returns the reference's log-probabilities of the answers, `[batch, documents]`; {} if they are cached."""
        if self.cached_logprobs:
            return {}
        return {"reference": answer_logprobs(forward(self.inputs(batch), model="reference"), batch)}

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        """Returns the loss, summed over pairs.

        Args:
            outputs: log-probabilities of the labels, `[batch, seq]`.
        """
        weights, logprobs, lengths = pair_weights(batch), answer_logprobs(outputs, batch), answer_lengths(batch)
        reference = batch.document_values("reference") if self.cached_logprobs else batch.extra["reference"]
        ratios = batch.by_item((logprobs - reference) / lengths if self.mean else logprobs - reference)
        losses = self.pair_loss(ratios[..., 0] - ratios[..., 1])
        if self.sft_weight:
            losses = losses - self.sft_weight * batch.by_item(logprobs / lengths)[..., 0]
        scalars = pair_scalars(self.beta * ratios.detach(), weights, batch.by_item(logprobs.detach()))
        return Loss((losses * weights).sum(), scalars)

    def pair_loss(self, difference: torch.Tensor) -> torch.Tensor:
        """Returns the loss of each pair, given the difference d of its log-ratios."""
        margin, e = self.beta * difference, self.smoothing
        if self.kind == "ipo":
            return (difference - 1 / (2 * self.beta)) ** 2
        if self.kind == "hinge":
            return torch.relu(1 - margin)
        if self.kind == "robust":
            return (e * logsigmoid(-margin) - (1 - e) * logsigmoid(margin)) / (1 - 2 * e)
        return -(1 - e) * logsigmoid(margin) - e * logsigmoid(-margin)

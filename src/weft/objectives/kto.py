"""Kahneman-Tversky optimization: learns from answers that are each labeled good or bad, not from pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt

from weft.data.batches.batch import Batch
from weft.data.batches.layout import Field
from weft.objectives.preference_pairs import answer_logprobs
from weft.parallel.objective import Forward, Loss, Objective


class KTO(Objective):
    """Kahneman-Tversky optimization (KTO; Ethayarajh et al., 2024): learns from answers that are labeled good or bad.

    The log-ratio of an answer is r = log(p / p_ref), where p and p_ref are the probabilities that the model and the
    frozen reference model give to the answer's tokens after its prompt. With the weights w of `desirable_weight` and
    `undesirable_weight`, the loss of a desirable answer (`label: true`) is w (1 - sigmoid(beta (r - z))), and the loss
    of an undesirable one w (1 - sigmoid(beta (z - r))). The loss of a step is the mean over the answers of the global
    batch.

    z estimates the KL divergence of the model from the reference, without gradient: the mean of r over mismatched pairs
    of a prompt and another prompt's answer, at least 0. As in the paper, one z applies to a batch, but here the batch
    is the global batch, so that neither micro-batches nor ranks change the loss. Mismatched pairs are made within each
    packed sequence: each prompt gets the answer of the next document, which keeps the number of tokens. A sequence of
    one document has none. In validation, z is estimated for each sequence.

    Metrics: `kl` (z), `accuracy` (fraction of desirable answers with r > z and of undesirable ones with r < z), and for
    desirable (`chosen`) and undesirable (`rejected`) answers the mean reward beta r and the mean log-probability.

    Args:
        beta: strength of the constraint to stay near the reference, such as 0.1.
        desirable_weight: weight of desirable answers. The paper recommends that desirable_weight times the number of
            desirable answers is 1 to 1.33 times undesirable_weight times the number of undesirable answers.
        undesirable_weight: weight of undesirable answers.
        reference: the reference model. `start`: the model with which the run starts, including a trained adapter that
            `adapter.from` names; or the path of a run, checkpoint or Hugging Face folder.
        cache_reference: whether the reference's log-probabilities of all tokens, in the answers and in the mismatched
            pairs, are computed once before training, and kept in the cache folder, with 8 bytes per token. Then the
            reference is not in memory during training.
    """

    inherits_dropout = False
    scalars = ("kl", "accuracy", "reward_chosen", "reward_rejected", "logprob_chosen", "logprob_rejected")

    def __init__(
        self,
        *,
        beta: Annotated[float, Gt(0)] = 0.1,
        desirable_weight: Annotated[float, Ge(0)] = 1.0,
        undesirable_weight: Annotated[float, Ge(0)] = 1.0,
        reference: str = "start",
        cache_reference: bool = False,
    ):
        self.beta, self.desirable_weight, self.undesirable_weight = beta, desirable_weight, undesirable_weight
        self.frozen_models, self.fields = {"reference": reference}, {"label": Field(per_document=True, choices=(0, 1))}
        self.cache_prepare = {"objective": "kto"} if cache_reference else None

    def weight(self, batch: Batch) -> torch.Tensor:
        """Returns the number of answers."""
        return batch.learned_documents.sum(dtype=torch.float64)

    def prepare(self, forward: Forward, batch: Batch) -> dict[str, Any]:
        """Computes what the loss needs of the reference.

        Returns:
            `reference`: the reference's log-probabilities of the answers, `[batch, documents]`. `kl`: for each sequence
            the sum of r over its mismatched pairs, and the number of these pairs, `[batch, 2]`.
        """
        of_reference = batch.extra if self.cache_prepare else self.prepare_frozen(forward, batch)
        mixed, count = mismatched(batch)
        ratios = (forward(self.inputs(mixed)) - of_reference["reference_mismatched"]).to(torch.float64) * mixed.weight
        kl = torch.stack((batch.sum_tokens(ratios) * (count > 0), count), 1)
        return {"reference": answer_logprobs(of_reference["reference_logprobs"], batch), "kl": kl}

    def prepare_frozen(self, forward: Forward, batch: Batch) -> dict[str, Any]:
        """Returns the reference's log-probabilities of the labels, in the batch and in mismatched pairs."""
        mixed, _ = mismatched(batch)
        return {
            "reference_logprobs": forward(self.inputs(batch), model="reference"),
            "reference_mismatched": forward(self.inputs(mixed), model="reference"),
        }

    def combine(self, prepared: Sequence[dict[str, Any]], reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces `kl` of each sequence by the sums over the sequences of the global batch."""
        total = reduce(torch.stack([one["kl"].sum(0) for one in prepared]).sum(0))
        for one in prepared:
            one["kl"] = total.expand_as(one["kl"])

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        """Returns the loss, summed over answers.

        Args:
            outputs: log-probabilities of the labels, `[batch, seq]`.
        """
        logprobs, kl = answer_logprobs(outputs, batch), batch.extra["kl"]
        ratios, z = logprobs - batch.extra["reference"], (kl[:, :1] / kl[:, 1:].clamp(min=1)).clamp(min=0)
        answers = batch.learned_documents.to(torch.float64) * batch.share
        good = batch.document_values("label") > 0.5
        losses = self.answer_loss(ratios, good, z)
        desirable, undesirable, found = answers * good, answers * ~good, ratios.detach()
        values = {
            "kl": (z.expand_as(answers), answers),
            "accuracy": (torch.where(good, found > z, found < z), answers),
            "reward_chosen": (self.beta * found, desirable),
            "reward_rejected": (self.beta * found, undesirable),
            "logprob_chosen": (logprobs.detach(), desirable),
            "logprob_rejected": (logprobs.detach(), undesirable),
        }
        scalars = {name: ((value * weights).sum(), weights.sum()) for name, (value, weights) in values.items()}
        return Loss((losses * answers).sum(), scalars)

    def answer_loss(self, ratios: torch.Tensor, good: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Returns the loss of each answer, given its log-ratio r, whether it is desirable, and the KL estimate z."""
        signs = torch.where(good, 1.0, -1.0)
        weights = torch.where(good, self.desirable_weight, self.undesirable_weight)
        return weights * (1 - torch.sigmoid(signs * self.beta * (ratios - z)))


def mismatched(batch: Batch) -> tuple[Batch, torch.Tensor]:
    """Gives each prompt of a sequence the answer of the next document of the sequence; the last gets the first's.

    An answer begins at the first learned token. The result has as many tokens as the batch. Documents without learned
    tokens, such as padding, do not change. With context parallelism, each rank gets its shard of the result.

    Returns:
        The batch, and the number of mismatched pairs of each sequence, float64 `[batch]`: 0 if it has only one answer.
    """
    segments, local = batch.segments, batch.segments if batch.local_segments is None else batch.local_segments
    if segments is None or local is None:
        return batch, batch.sequence_weight * 0
    learned, device = batch.learned_documents, segments.device
    places = torch.arange(segments.shape[1], device=device).expand_as(segments)
    starts = places.new_full(learned.shape, segments.shape[1]).scatter_reduce(1, segments, places, "amin")
    own = starts.gather(1, local) + batch.positions  # place of each token of this rank in the full sequence
    total = batch.sum_over_ranks or (lambda x: x)

    def full(values: torch.Tensor) -> torch.Tensor:
        return total(values.new_zeros(segments.shape).scatter(1, own, values))

    tokens, labels, weight = (full(values) for values in (batch.tokens, batch.labels, batch.weight))
    first = places.new_full(learned.shape, segments.shape[1]).scatter_reduce(
        1, segments, torch.where(weight > 0, places, segments.shape[1]), "amin"
    )  # place of the input whose label is the first token of the answer
    columns = torch.arange(learned.shape[1], device=device).expand_as(learned)
    before = torch.where(learned, columns, -1).cummax(1).values.roll(1, 1)  # the previous document with an answer
    before[:, 0] = -1
    last = torch.where(learned, columns, -1).amax(1, keepdim=True)
    before = torch.where(learned, torch.where(before < 0, last, before), columns)
    answers, beginning = before.gather(1, segments), first.gather(1, segments)

    def order(in_answer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        documents = torch.where(in_answer, answers, segments)
        found = (2 * documents + in_answer).argsort(dim=1, stable=True)
        return found, documents.gather(1, found)

    inputs, documents = order(places > beginning)
    targets, _ = order(places >= beginning)
    begins = places.new_full(learned.shape, segments.shape[1]).scatter_reduce(1, documents, places, "amin")
    positions = places - begins.gather(1, documents)
    moved = {"tokens": tokens.gather(1, inputs), "labels": labels.gather(1, targets)}
    moved |= {"weight": weight.gather(1, targets), "positions": positions}
    mixed = replace(
        batch,
        **{name: values.gather(1, own) for name, values in moved.items()},
        segments=documents,
        local_segments=None if batch.local_segments is None else documents.gather(1, own),
    )
    count = learned.sum(1, dtype=torch.float64)
    return mixed, count * (count > 1)

"""Sums over answers and metrics of preference pairs, which the preference objectives share.

An answer is the learned tokens of a document. A pair is two adjacent documents of a sequence: chosen, then rejected.
"""

from __future__ import annotations

import torch

from weft.data.batches.batch import Batch
from weft.parallel.objective import Pair

PAIR_SCALARS = ("margin", "accuracy", "reward_chosen", "reward_rejected", "logprob_chosen", "logprob_rejected")


def pair_weights(batch: Batch) -> torch.Tensor:
    """Returns the weight of each pair in a sum over pairs, float64 `[batch, pairs]`: 1, or 0 for padding.

    With context parallelism the weight is 1 / cp on each of the `cp` ranks that process the pair.
    """
    return batch.by_item(batch.learned_documents).all(-1).to(torch.float64) * batch.share


def answer_logprobs(logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Returns the log-probability of each document's answer given its prompt, float64 `[batch, documents]`.

    Args:
        logprobs: log-probabilities of the labels, `[batch, seq]`.
    """
    return batch.document_sums(logprobs.to(torch.float64) * batch.weight)


def answer_lengths(batch: Batch) -> torch.Tensor:
    """Returns the number of tokens of each answer, float64 `[batch, documents]`; 1 for documents without an answer."""
    lengths = batch.document_sums(batch.weight)
    return lengths.masked_fill(lengths == 0, 1.0)


def pair_scalars(rewards: torch.Tensor, weights: torch.Tensor, logprobs: torch.Tensor | None = None) -> dict[str, Pair]:
    """Returns the scalars that `PAIR_SCALARS` names, as sums over pairs with weights.

    Args:
        rewards: rewards of the chosen and the rejected answers, `[batch, pairs, 2]`.
        weights: result of `pair_weights`.
        logprobs: log-probabilities of the answers, `[batch, pairs, 2]`; None leaves out their scalars.
    """
    margin = rewards[..., 0] - rewards[..., 1]
    values = {
        "margin": margin,
        "accuracy": margin > 0,
        "reward_chosen": rewards[..., 0],
        "reward_rejected": rewards[..., 1],
    }
    if logprobs is not None:
        values |= {"logprob_chosen": logprobs[..., 0], "logprob_rejected": logprobs[..., 1]}
    return {name: ((value * weights).sum(), weights.sum()) for name, value in values.items()}

"""Defines `evaluate_preferences`, which measures how often a model prefers the chosen answer of a pair."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.data.batches.batch import Batch
from weft.data.batches.loader import ValidationBatches
from weft.data.sequences.packed import PackedDataset
from weft.data.stores.store import TokenStore
from weft.errors import UserError
from weft.evaluation.perplexity import check_fit
from weft.evaluation.settings import Settings
from weft.generation.limits import check_length
from weft.generation.runners import eval_mode
from weft.models.decoder import Decoder
from weft.models.forward import forward_of
from weft.objectives.preference_pairs import answer_lengths, answer_logprobs, pair_scalars, pair_weights
from weft.objectives.reward import document_scores
from weft.observe.console import Console

INPUTS = ("tokens", "positions", "segments", "labels")


@dataclass(frozen=True)
class PreferenceResult:
    """The result of an evaluation on one store of preference pairs.

    Attributes:
        store: path of the store, or of the raw data that were packed into it.
        pairs: number of pairs.
        accuracy: fraction of the pairs whose chosen answer has the higher reward, 0 .. 1.
        margin: mean difference between the rewards of the chosen and the rejected answer.
        reward: what the reward is: "score" of a reward model, "log-probability", or "log-probability ratio" to a
            reference model; the last two end in " per token" with `Settings.per_token`.
    """

    store: str
    pairs: int
    accuracy: float
    margin: float
    reward: str

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as JSON values."""
        return vars(self).copy()


def is_reward_model(model: nn.Module) -> bool:
    """Whether a model is a decoder that returns scores (`num_labels`)."""
    return isinstance(model, Decoder) and model.config.num_labels is not None


def evaluate_preferences(
    model: nn.Module,
    store: TokenStore,
    settings: Settings,
    console: Console,
    name: str | None = None,
    reference: nn.Module | None = None,
) -> PreferenceResult:
    """Evaluates a model on a store of preference pairs. The reward of an answer is

    - of a reward model, the score at the last token of the document;
    - of any other model, the log-probability of the answer given its prompt, minus that of `reference`, if given.

    Args:
        settings: a result of `Settings.with_windows`. Pairs longer than `sequence_length` are left out, with a warning.
        name: name of the store in the result, such as the path of raw data; default: the path of the store.
        reference: a model with the same vocabulary.

    Raises:
        UserError: the store does not fit the models, no pair fits into a sequence, or a reward is not finite.
    """
    length, scored = settings.sequence_length, is_reward_model(model)
    assert length is not None
    if scored and (reference is not None or settings.per_token):
        given = "reference" if reference is not None else "per_token"
        raise UserError(f"`{given}` has no effect on a reward model, whose rewards are its scores; omit it")
    models = [model] if reference is None else [model, reference]
    for one in models:
        check_length(one, length, "the pairs need", "set a shorter sequence length")
        check_fit(one, store, settings.tokenizer)
    if reference is not None and is_reward_model(reference):
        raise UserError("`reference` is a reward model, which has no log-probabilities; use the model before training")
    dataset = PackedDataset(store, length, last_tokens=scored)
    if dataset.too_long:
        what = f"{dataset.too_long:,} pairs longer than {length:,} tokens left out; set a longer sequence length"
        warnings.warn(f"{store.path}: {what}", stacklevel=2)
    device = next(model.parameters()).device
    totals = dict.fromkeys(("accuracy", "margin"), 0.0)
    pairs, batches = 0.0, ValidationBatches(dataset, batch_size=settings.batch_size)
    progress = console.progress(len(dataset), f"evaluating {Path(name or store.path).name}", "sequence")
    with torch.no_grad(), progress as bar:
        for number, batch in enumerate(batches):
            batch = batch.to(device)
            rewards = _scores(model, batch) if scored else _logprobs(models, batch, settings.per_token)
            found = pair_scalars(batch.by_item(rewards), pair_weights(batch))
            pairs += float(found["margin"][1])
            for key in totals:
                totals[key] += float(found[key][0])
            bar.update(min(len(dataset), (number + 1) * settings.batch_size))
    if not math.isfinite(totals["margin"]):
        raise UserError("the model's rewards are not finite; try `dtype` float32, or use another checkpoint")
    kind = "score" if scored else "log-probability" + " ratio" * (reference is not None)
    kind += " per token" * settings.per_token
    means = {key: total / pairs for key, total in totals.items()}
    return PreferenceResult(name or str(store.path), round(pairs), **means, reward=kind)


def _scores(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs = {key: getattr(batch, key) for key in INPUTS if key != "labels"}
    with eval_mode(model):
        return document_scores(forward_of(model)(inputs), batch)


def _logprobs(models: list[nn.Module], batch: Batch, per_token: bool) -> torch.Tensor:
    """Returns the rewards of answers, `[batch, documents]`: log-probabilities, minus those of the second model."""
    found = []
    for model in models:
        with eval_mode(model):
            outputs = forward_of(model)({key: getattr(batch, key) for key in INPUTS})
        found.append(answer_logprobs(outputs, batch))
    rewards = found[0] if len(found) == 1 else found[0] - found[1]
    return rewards / answer_lengths(batch) if per_token else rewards

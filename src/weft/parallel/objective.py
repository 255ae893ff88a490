"""Defines the interface between objectives (built-in and custom) and the forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from weft.data.batches.batch import Batch
from weft.errors import UserError

Forward = Callable[..., torch.Tensor]  # forward(inputs, model=NAME): a model's arguments -> its outputs
Pair = tuple[float | torch.Tensor, float | torch.Tensor]  # a sum and its weight


@dataclass(frozen=True)
class Loss:
    """A loss with named scalars for the metrics. `Objective.loss` can return it instead of a tensor.

    Attributes:
        sum: scalar tensor, the loss summed over the units that `Objective.weight` counts (such as tokens).
        scalars: name -> (sum, weight) over the sequences of the batch. Sums and weights are added over micro-batches
            and ranks, and the step's metrics contain sum / weight. Names must be in the objective's `scalars`.
    """

    sum: torch.Tensor
    scalars: Mapping[str, Pair] = field(default_factory=dict)


class Objective:
    """A training objective: returns the model's `inputs`, and the `loss` of the model's outputs.

    The loss is a sum. Weft divides it by the `weight` of the global batch, so that results do not depend on the number
    of micro-batches or ranks. A subclass needs only `loss`: `inputs` and `weight` are those of next-token prediction. A
    custom objective need not inherit from this class.

    Optional attributes of the class or the object:

    - `fields`: name -> `weft.objectives.Field`: fields of samples in addition to tokens, passed in `batch.extra`.
    - `data`: "preferences" if the objective learns from token stores of preference pairs; default "text". A pair is two
      adjacent documents of a sequence: see `Batch.by_item`.
    - `inherits_dropout`: False turns off the dropout of the model in `model.from`; the dropout that the run file sets
      stays on. Default True.
    - `last_tokens`: True if documents of token stores have their last token as an input, too. It has no label, so by
      default it is not among the inputs.
    - `sequences_per_sample`: number of sequences per sample, such as 2 for pairs; default 1.
    - `scalars`: names of the scalars that `loss` returns.
    - `weigh_documents`: True divides `batch.weight` by its sum over each document, so that the weights of a document
      add up to 1; default False.
    - `normalizers`: True makes the model return `[batch, seq, 2]` if `inputs` returns `labels`: the log-probability of
      each label, and the normalizer log(sum(exp(logits))); default False.
    - `embedding_noise`: magnitude of the noise that training adds to the embeddings (`EmbeddingNoise`); default 0.
    - `cache_prepare`: a JSON value that identifies what `prepare` computes with the frozen models, such as its
      settings. Then `prepare` is called once for each sample, before the training, and its results `[batch, seq, ...]`
      are cached. It must not call the trained model; what needs it belongs into `prepare`, and the rest into
      `prepare_frozen`. Default None: no cache.
    - `frozen_models`: name -> source of models that `prepare` calls and that are not trained, such as a reference or a
      teacher. A source is "start" (the model with which the run starts, also after it resumes) or the path of a run, a
      checkpoint or a Hugging Face folder.
    - `cached_logprobs`: name of a field -> name in `frozen_models`. The field is the sum of the log-probabilities that
      the frozen model gives to the learned tokens of each document (`Batch.document_values`). It is computed once
      before training, and the frozen model is not in memory during training.

    Optional methods:

    - `batch(records) -> dict` converts what a user's loop passes to `Trainer.step`, such as a list of prompts, answers
      and rewards, to a dict of CPU tensors or arrays: `tokens` or `input_ids`, and the declared fields.
    - `prepare(forward, batch) -> dict` runs before the forward pass of each micro-batch (with pipeline parallelism,
      before those of the step), without gradient and dropout. The dict that it returns is added to `batch.extra` before
      `inputs` and `loss` are called. `forward(inputs)` calls the trained model, and `forward(inputs, model=NAME)` a
      model of `frozen_models`.
    - `prepare_frozen(forward, batch) -> dict` is called in place of `prepare` to compute the results that are cached
      because of `cache_prepare`. `prepare` then runs in each step, too, with these results in `batch.extra`.
    - `combine(prepared, reduce)` runs in each training step after `prepare`, which then runs for all micro-batches
      first: `prepared` is the list of their dicts, which it can change, and `reduce(tensor)` sums a tensor over the
      data parallel ranks. So values can depend on the global batch. It does not run in validation.
    - `compute(forward, batch) -> Tensor | Loss` replaces `inputs` and `loss`. It can call the model several times, with
      gradient. It is not supported with pipeline parallelism, where the schedule calls the model.
    """

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Returns the model's arguments: `tokens`, `positions`, `segments` and, optionally, `labels`.

        With `labels` the model returns the log-probability of each label instead of logits. With `logits_function`, a
        function `(logits [n, vocab], tokens) -> [n] or [n, values]` of chunks of logits, the model returns the
        function's values for each token; `tokens` is the slice of the chunk in the flattened tokens of the batch. Only
        one chunk of logits at a time exists in float32 (or float64). Each token's values must depend only on the
        token's logits.
        """
        names = ("tokens", "positions", "segments", "labels")
        return {name: getattr(batch, name) for name in names}

    def weight(self, batch: Batch) -> torch.Tensor:
        """Returns the weight of the batch as a scalar tensor. Default: the sum of the weights of its tokens."""
        return batch.weight.sum(dtype=torch.float64)

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor | Loss:
        """Returns the loss, summed over the units that `weight` counts (such as tokens).

        Args:
            outputs: log-probabilities `[batch, seq]` if `inputs` returned `labels` (`[batch, seq, 2]` with
                `normalizers`); values of `logits_function`, `[batch, seq]` or `[batch, seq, values]`, if `inputs`
                returned it; else logits `[batch, seq, vocab]`.
        """
        raise NotImplementedError


class Totals:
    """Sums of the loss and of named scalars over batches.

    Attributes:
        names: names of the scalars, the same on all ranks.
        vector: float64 `[1 + 2 * len(names)]`: the sum of the loss, then a sum and a weight per name.
    """

    def __init__(self, names: Sequence[str], device: torch.device):
        self.names = tuple(names)
        self.vector = torch.zeros(1 + 2 * len(self.names), dtype=torch.float64, device=device)

    def add(self, found: torch.Tensor | Loss) -> torch.Tensor:
        """Adds the loss that an objective returned to the totals. Returns this loss as a scalar tensor, for backward.

        Raises:
            UserError: if the loss is not a scalar tensor, or has a named scalar that is not in `names` or not a pair.
        """
        loss, scalars = (found.sum, found.scalars) if isinstance(found, Loss) else (found, {})
        if not isinstance(loss, torch.Tensor) or loss.dim():
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise UserError(
                f"objective: the loss must be a scalar (0-dimensional) tensor, not {what}; return the summed loss"
            )
        if other := scalars.keys() - set(self.names):
            name = sorted(other)[0]
            raise UserError(
                f"objective: the loss has a scalar {name!r}, which is not in `scalars` of the class; add the name"
            )
        check_pairs("objective", scalars)
        self.vector[0] += loss.detach()
        for number, name in enumerate(self.names):
            for offset, value in enumerate(scalars.get(name, ())):
                value = value.detach() if isinstance(value, torch.Tensor) else value
                self.vector[1 + 2 * number + offset] += value
        return loss


def check_pairs(source: str, values: Mapping[str, Any]) -> None:
    """Raises UserError if a value is not a pair (sum, weight) of numbers. `source`: who returned the values."""
    for name, value in values.items():
        parts = value if isinstance(value, tuple | list) else ()
        if [isinstance(one, Real) or getattr(one, "ndim", 1) == 0 for one in parts] != [True, True]:
            what = f"must be a pair (sum, weight), not a {type(value).__name__}"
            raise UserError(f"{source}: {name!r} {what}; return two numbers")


def quotients(names: Sequence[str], pairs: Sequence[float]) -> dict[str, float]:
    """Returns name -> sum / weight, given alternating sums and weights in `pairs`. Omits names with weight 0."""
    found = zip(names, pairs[::2], pairs[1::2], strict=True)
    return {name: total / weight for name, total, weight in found if weight}

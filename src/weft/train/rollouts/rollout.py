"""Defines `Rollout`, the completions of a rollout, and packs them into batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from weft.data.batches.batch import Batch
from weft.data.batches.layout import Layout
from weft.data.sequences.best_fit import best_fit_decreasing

PER_TOKEN, PER_DOCUMENT = ("learned", "rollout_logprobs", "old_logprobs"), ("advantage", "truncated")
TENSORS = ("tokens", *PER_TOKEN, "lengths", *PER_DOCUMENT)


class Completion(NamedTuple):
    """A prompt with its completion.

    Attributes:
        ids: token ids of the prompt and of the completion.
        learned: 1 for tokens that the model generated, 0 for those of the prompt and of results of tools.
        logprobs: the engine's log-probability of each token that the model generated; 0 for other tokens.
        truncated: whether the completion was cut off because it is too long.
        answers: texts of the model's messages.
        messages: the messages of the conversation, with the completion; for a prompt of text, empty.
        scores: the score by each reward model.
    """

    ids: list[int]
    learned: list[int]
    logprobs: list[float]
    truncated: bool
    answers: list[str]
    messages: list[dict[str, Any]]
    scores: Sequence[float] = ()

    @property
    def new_tokens(self) -> int:
        """Number of tokens that the model generated."""
        return sum(self.learned)


@dataclass
class Rollout:
    """The completions of a rollout as documents, equal on all ranks.

    Attributes:
        number: index of the rollout in the run.
        tokens: token ids of all documents, one after another, int64 `[tokens]`.
        learned: whether the model generated each token, uint8 `[tokens]`.
        rollout_logprobs, old_logprobs: log-probability of each learned token, in the engine and in the trained model
            before the first update; float64 `[tokens]`, 0 for other tokens. `old_logprobs` is NaN until it is computed.
        lengths: number of tokens of each document, int64 `[documents]`.
        advantage: advantage of each document; its reward if the objective chooses documents by `choose`; float64
            `[documents]`.
        truncated: whether each completion was cut off, float64 `[documents]`.
        metrics: the metrics of the rollout.
    """

    number: int
    tokens: torch.Tensor
    learned: torch.Tensor
    rollout_logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    lengths: torch.Tensor
    advantage: torch.Tensor
    truncated: torch.Tensor
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, number: int, completions: Sequence[Completion], advantages: torch.Tensor) -> Rollout:
        """Returns the rollout of completions `[documents]` with their advantages."""

        def joined(parts: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([value for part in parts for value in part], dtype=dtype)

        logprobs = joined((one.logprobs for one in completions), torch.float64)
        return cls(
            number,
            joined((one.ids for one in completions), torch.int64),
            joined((one.learned for one in completions), torch.uint8),
            logprobs,
            torch.full_like(logprobs, float("nan")),
            torch.tensor([len(one.ids) for one in completions]),
            advantages.flatten().to("cpu", torch.float64),
            torch.tensor([float(one.truncated) for one in completions], dtype=torch.float64),
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the tensors and JSON values of a checkpoint."""
        return {"number": self.number, "metrics": self.metrics, **{name: getattr(self, name) for name in TENSORS}}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Rollout:
        """Returns the rollout of a state that `state_dict` returned."""
        return cls(**{name: state[name] for name in ("number", *TENSORS, "metrics")})


@dataclass(frozen=True)
class PackedDocuments:
    """Documents of a rollout, packed into sequences.

    Attributes:
        batch: the global batch.
        source: index in `Rollout.tokens` of the label at each position, int64 `[batch, seq]`; -1 for padding.
    """

    batch: Batch
    source: torch.Tensor


def pack_documents(
    rollout: Rollout,
    documents: range,
    length: int,
    layout: Layout,
    *,
    padding: int,
    first_sample: int,
    per_item: int = 1,
) -> PackedDocuments:
    """Packs documents of a rollout into sequences by best fit.

    A document of n tokens has n - 1 inputs, each with the next token as its label.

    Args:
        documents: indices of the documents.
        length: number of inputs per sequence. No document has more than `length` + 1 tokens.
        layout: the fields of the batch: those of `Rollout` by name.
        padding: token id of padding.
        first_sample: value of `Batch.samples` of the first sequence.
        per_item: number of consecutive documents that are adjacent documents of the same sequence.
    """
    begins = rollout.lengths.cumsum(0) - rollout.lengths
    items = [documents[first : first + per_item] for first in range(0, len(documents), per_item)]
    bins = fill_bins([sum(int(rollout.lengths[number]) - 1 for number in item) for item in items], length)
    shape = (len(bins), length)
    source = torch.full(shape, -1, dtype=torch.int64)
    positions, segments = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    owner = torch.full(shape, -1, dtype=torch.int64)
    for row, members in enumerate(bins):
        at = 0
        for column, number in enumerate(number for member in members for number in items[member]):
            size, begin = int(rollout.lengths[number]) - 1, int(begins[number])
            part = slice(at, at + size)
            source[row, part] = torch.arange(begin + 1, begin + 1 + size)
            positions[row, part] = torch.arange(size)
            segments[row, part], owner[row, part] = column, number
            at += size
        positions[row, at:] = torch.arange(length - at)
        segments[row, at:] = len(members) * per_item
    real, place = source >= 0, source.clamp(min=0)
    weight = (rollout.learned[place] * real).to(torch.float32)
    extra = {}
    for name, declared in layout.fields.items():
        value = getattr(rollout, name)[owner.clamp(min=0) if declared.per_document else place]
        value = torch.where(real if declared.per_document else weight > 0, value, 0.0)
        extra[name] = value.to(getattr(torch, declared.dtype))
    batch = Batch(
        tokens=torch.where(real, rollout.tokens[(place - 1).clamp(min=0)], padding),
        labels=torch.where(real, rollout.tokens[place], padding),
        weight=weight,
        positions=positions,
        segments=segments,
        samples=torch.arange(first_sample, first_sample + len(bins)),
        extra=extra,
        layout=layout,
    )
    return PackedDocuments(batch.weigh_documents() if layout.weigh_documents else batch, source)


def fill_bins(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs items of `sizes` into bins by best fit. Returns the indices of the items in each bin."""
    by_size: dict[int, list[int]] = {}
    for index, size in enumerate(sizes):
        by_size.setdefault(size, []).append(index)
    patterns = best_fit_decreasing(np.bincount(sizes, minlength=capacity + 1), capacity)
    bins = []
    for pattern, count in enumerate(patterns.bins.tolist()):
        entries = range(int(patterns.offsets[pattern]), int(patterns.offsets[pattern + 1]))
        for number in range(count):
            items: list[int] = []
            for entry in entries:
                each, first = int(patterns.repeats[entry]), int(patterns.firsts[entry])
                items += by_size[int(patterns.sizes[entry])][first + number * each :][:each]
            bins.append(items)
    return bins

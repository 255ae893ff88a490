"""Pairs and labeled answers with made-up logits: packed as Weft has them, and padded as TRL has them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from weft.data.batches.batch import Batch
from weft.data.batches.given import batch_from
from weft.data.batches.layout import Layout

VOCABULARY = 12


@dataclass
class Document:
    """A prompt, an answer, and logits of the model and of the reference for each token but the last."""

    prompt: list[int]
    answer: list[int]
    logits: torch.Tensor = field(init=False)
    reference: torch.Tensor = field(init=False)

    def __post_init__(self):
        chooser = torch.Generator().manual_seed(sum(self.ids) + 100 * len(self.ids) + self.ids[-1])
        shape = (2, len(self.ids) - 1, VOCABULARY)
        self.logits, self.reference = torch.randn(shape, generator=chooser, dtype=torch.float64)

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.answer


def documents(count: int, seed: int = 0) -> list[Document]:
    chooser = np.random.default_rng(seed)

    def ids(most: int) -> list[int]:
        return chooser.integers(0, VOCABULARY, chooser.integers(1, most + 1)).tolist()

    return [Document(ids(4), ids(5)) for _ in range(count)]


def packed(rows: list[list[Document]], length: int, layout: Layout | None = None, **fields: list[list[float]]) -> Batch:
    """The documents of each row in one sequence, each but for its last token, and padding behind them."""
    keys = ("tokens", "labels", "weight", "positions", "segments", *fields)
    lists: dict[str, list[list]] = {key: [] for key in keys}
    for number, row in enumerate(rows):
        found: dict[str, list] = {key: [] for key in keys}
        for index, one in enumerate(row):
            size = len(one.ids) - 1
            found["tokens"] += one.ids[:-1]
            found["labels"] += one.ids[1:]
            found["weight"] += [0] * (len(one.prompt) - 1) + [1] * len(one.answer)
            found["positions"] += range(size)
            found["segments"] += [index] * size
            for name, values in fields.items():
                found[name] += [values[number][index]] * size
        left = length - len(found["tokens"])
        for key, value in found.items():
            fill = range(left) if key == "positions" else [len(row) if key == "segments" else 0] * left
            lists[key].append([*value, *fill])
    return batch_from({key: np.array(value) for key, value in lists.items()}, layout or Layout())


def logprobs(rows: list[list[Document]], batch: Batch, name: str = "logits") -> torch.Tensor:
    """Log-probabilities of a batch's labels, which the model or the reference would return; leaves for gradients."""
    length = batch.tokens.shape[1]
    padded = [torch.cat([getattr(one, name) for one in row]) for row in rows]
    padded = torch.stack([torch.nn.functional.pad(one, (0, 0, 0, length - len(one))) for one in padded])
    return padded.log_softmax(-1).gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1)


def padded(found: list[Document]) -> dict[str, torch.Tensor]:
    """The documents in TRL's form: complete ids, padded on the right, with masks."""
    width = max(len(one.ids) for one in found)
    rows = {
        "input_ids": [one.ids + [0] * (width - len(one.ids)) for one in found],
        "attention_mask": [[1] * len(one.ids) + [0] * (width - len(one.ids)) for one in found],
        "completion_mask": [
            [0] * len(one.prompt) + [1] * len(one.answer) + [0] * (width - len(one.ids)) for one in found
        ],
    }
    return {key: torch.tensor(value) for key, value in rows.items()}


def answer_sums(found: list[Document], name: str = "logits", *, mean: bool = False) -> torch.Tensor:
    """The log-probability of each document's answer, by hand."""
    sums = []
    for one in found:
        first = len(one.prompt) - 1
        each = getattr(one, name)[first:].log_softmax(-1)[range(len(one.answer)), one.answer]
        sums.append(each.mean() if mean else each.sum())
    return torch.stack(sums)

"""Objectives on pairs with fields of their own and forwards beside the usual one, and data for them."""

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from weft.objectives import Field, Loss, Objective

PARTS = ("tokens", "positions", "segments", "labels")


class Pairs:
    """Two sequences a sample, with a margin of each, a picture, and a log-probability of each token."""

    def __init__(self, *, count: int = 64, length: int = 32):
        self.count, self.length = count, length

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        chooser = np.random.default_rng([11, index])
        return {
            "tokens": chooser.integers(0, 256, (2, self.length)),
            "weight": (chooser.random((2, self.length)) < 0.7).astype(np.float32),
            "reference": -chooser.random((2, self.length)),
            "margin": chooser.random(2),
            "picture": chooser.integers(0, 255, (2, 3, 4)),
        }


class Packed:
    """Two items of two documents a sequence, then padding; a reward of each document, an answer of each but one."""

    def __init__(self, *, count: int = 64, length: int = 32):
        self.count, self.length = count, length

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        chooser = np.random.default_rng([13, index])
        segments = np.sort(chooser.choice(np.arange(1, self.length), 4, replace=False))
        segments = (np.arange(self.length)[:, None] >= segments).sum(1)
        positions = np.arange(self.length) - np.searchsorted(segments, segments)
        weight = (chooser.random(self.length) < 0.6) & (segments < (2 if index % 3 else 4))
        return {
            "tokens": chooser.integers(0, 256, self.length),
            "weight": weight.astype(np.float32),
            "segments": segments,
            "positions": positions,
            "reward": chooser.random(5)[segments],
        }


class Documents:
    """The first document of each item is to be likelier than the second, by a margin of the difference of rewards."""

    scalars = ("accuracy", "chosen")

    def __init__(self):
        self.fields = {"reward": Field(dtype="float64", per_document=True)}

    def inputs(self, batch):
        return {part: getattr(batch, part) for part in PARTS}

    def weight(self, batch):
        return batch.by_item(batch.learned_documents).all(-1).sum()

    def prepare(self, forward, batch):
        return {"old": batch.document_sums(forward(self.inputs(batch)) * batch.weight)}

    def loss(self, outputs, batch):
        counts = batch.by_item(batch.learned_documents).all(-1) * batch.share
        lengths = batch.document_sums(batch.weight).clamp(min=1)
        each = batch.document_sums(outputs * batch.weight) + 0.3 * batch.extra["old"]
        score = batch.by_item(each / lengths - batch.document_values("reward"))
        apart = score[..., 0] - score[..., 1]
        scalars = {
            "accuracy": (((apart > 0) * counts).sum(), counts.sum()),
            "chosen": ((score[..., 0] * counts).sum(), counts.sum()),
        }
        return Loss(-(logsigmoid(apart) * counts).sum(), scalars)


class Preference:
    """The chosen sequence is to be likelier than the rejected one, counted from the reference (Rafailov et al., 2023).

    So that every seam counts, the margin, the picture and what `prepare` found take part in it.
    """

    sequences_per_sample = 2
    scalars = ("accuracy", "chosen")

    def __init__(self):
        self.fields = {
            "reference": Field(seq_dim=0, dtype="float64"),
            "margin": Field(dtype="float64"),
            "picture": Field(dtype="uint8"),
        }

    def inputs(self, batch):
        return {part: getattr(batch, part) for part in PARTS}

    def weight(self, batch):
        return batch.by_sample(batch.sequence_weight)[:, 0].sum()

    def prepare(self, forward, batch):
        assert batch.tokens.shape == batch.extra["reference"].shape
        return {"old": forward(self.inputs(batch))}

    def loss(self, outputs, batch):
        counts = batch.by_sample(batch.sequence_weight)[:, 0]
        each = (outputs - batch.extra["reference"] + 0.3 * batch.extra["old"]) * batch.weight
        score = batch.by_sample(batch.sum_tokens(each) - batch.extra["margin"])
        bright = batch.by_sample(batch.extra["picture"].double().mean((1, 2)) / 255)
        apart = 0.3 * (score[:, 0] - score[:, 1]) + bright[:, 0]
        scalars = {
            "accuracy": (((apart > 0) * counts).sum(), counts.sum()),
            "chosen": ((score[:, 0] * counts).sum(), counts.sum()),
        }
        return Loss(-(logsigmoid(apart) * counts).sum(), scalars)


class Twice(Preference):
    """The same by two forwards with gradient, of which the mean is taken."""

    prepare = None

    def compute(self, forward, batch):
        batch.extra["old"] = forward(self.inputs(batch)).detach()
        both = forward(self.inputs(batch)), forward(self.inputs(batch))
        return self.loss((both[0] + both[1]) / 2, batch)


class Certain:
    """Cross-entropy plus the entropy of each token, scaled by the two largest logits that `prepare` found.

    Args:
        chunks: whether the model computes both from chunks of logits; else from all logits.
    """

    scalars = ("entropy",)

    def __init__(self, *, chunks: bool):
        self.chunks = chunks

    def weight(self, batch):
        return batch.weight.sum()

    def _inputs(self, batch, function):
        inputs = {part: getattr(batch, part) for part in PARTS[:3]}
        return inputs | {"logits_function": function} if self.chunks else inputs

    def prepare(self, forward, batch):
        found = forward(self._inputs(batch, self._largest))
        return {
            "largest": found
            if self.chunks
            else self._largest(found.flatten(0, 1), slice(None)).unflatten(0, batch.tokens.shape)
        }

    def _largest(self, logits, tokens):
        return logits.topk(2).values

    def inputs(self, batch):
        return self._inputs(batch, lambda logits, tokens: self._both(batch, logits, tokens))

    def _both(self, batch, logits, tokens):
        logprobs = logits.log_softmax(-1)
        labels = batch.labels.flatten()[tokens].unsqueeze(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1) * batch.extra["largest"].flatten(0, 1)[tokens].sum(-1)
        return torch.stack((-logprobs.gather(-1, labels).squeeze(-1), entropy), -1)

    def loss(self, outputs, batch):
        if not self.chunks:
            outputs = self._both(batch, outputs.flatten(0, 1), slice(None)).unflatten(0, batch.tokens.shape)
        both = (outputs * batch.weight.unsqueeze(-1)).sum((0, 1))
        return Loss(both.sum(), {"entropy": (both[1], batch.weight.sum())})


class Kept(Objective):
    """Sequences are to become likelier than a frozen model has them, or less likely, in turn.

    The scalars are what the frozen model and the trained one say of a learned token, before the update.
    """

    scalars = ("kept", "trained")

    def __init__(self, *, source: str = "start", called: str = "kept", factor: float = 0.3):
        self.frozen_models, self.called, self.factor = {"kept": source}, called, factor

    def weight(self, batch):
        return batch.sequence_weight.sum()

    def prepare(self, forward, batch):
        inputs = self.inputs(batch)
        before = forward(inputs)
        kept = forward(inputs, model=self.called)
        assert (forward(inputs) == before).all()
        return {"kept": kept, "trained": before}

    def loss(self, outputs, batch):
        each = {name: (batch.extra[name] * batch.weight).sum(dtype=torch.float64) for name in self.scalars}
        apart = batch.sum_tokens((outputs - 1.1 * batch.extra["kept"] + 0.1 * batch.extra["trained"]) * batch.weight)
        apart = self.factor * apart * (1 - 2 * (batch.samples.abs() % 2))
        scalars = {name: (value, batch.weight.sum(dtype=torch.float64)) for name, value in each.items()}
        return Loss(-(logsigmoid(apart) * batch.sequence_weight).sum(), scalars)


class Compared(Objective):
    """Of two answers, one is to become likelier than a frozen model has it, counted from the other.

    The frozen model is asked in each step, or once.
    """

    data = "preferences"
    scalars = ("kept",)

    def __init__(self, *, source: str = "start", once: bool = False):
        self.frozen_models, self.once = {"kept": source}, once
        self.cached_logprobs = {"kept_logprobs": "kept"} if once else {}

    def weight(self, batch):
        return batch.by_item(batch.learned_documents).all(-1).sum()

    def prepare(self, forward, batch):
        return {} if self.once else {"kept": self.sums(forward(self.inputs(batch), model="kept"), batch)}

    def loss(self, outputs, batch):
        kept = batch.document_values("kept_logprobs") if self.once else batch.extra["kept"]
        counts = batch.by_item(batch.learned_documents).all(-1) * batch.share
        apart = batch.by_item(self.sums(outputs, batch) - kept)
        scalars = {"kept": ((batch.by_item(kept).sum(-1) * counts).sum(), counts.sum())}
        return Loss(-(logsigmoid(0.3 * (apart[..., 0] - apart[..., 1])) * counts).sum(), scalars)

    def sums(self, logprobs, batch):
        return batch.document_sums(logprobs.double() * batch.weight)

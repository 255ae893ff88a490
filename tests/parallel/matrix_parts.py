"""The parts of the matrix' runs that are the tests' own: an optimizer that keeps its gradients, and data."""

import numpy as np
import torch

from weft.parallel.local_parameters import local


class PlainSGD(torch.optim.Optimizer):
    """w -= lr * (gradients, older ones less and less); a checkpoint has every gradient of its step, for it keeps them.

    No root and no division: where gradients differ by a little, so do weights.
    """

    def __init__(self, params, *, lr: float = 0.1, momentum: float = 0.5):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    raise RuntimeError(f"a parameter of shape {tuple(parameter.shape)} has no gradient")
                state = self.state[parameter]
                for name in ("gradient", "sum"):
                    if name not in state:
                        state[name] = torch.zeros_like(parameter)
                # Of shards: how DTensors' own arithmetic is sharded would take longer to find than the rest of a run.
                weight, gradient, summed = map(local, (parameter, parameter.grad, state["sum"]))
                local(state["gradient"]).copy_(gradient)
                summed.mul_(group["momentum"]).add_(gradient)
                weight.add_(summed, alpha=-group["lr"])


class Answers:
    """Two answers and their prompts a sequence, then padding, with all fields of `grpo`; some answers are truncated."""

    def __init__(self, *, count: int = 64, length: int = 32, vocabulary: int = 256):
        self.count, self.length, self.vocabulary = count, length, vocabulary

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        chooser = np.random.default_rng([17, index])
        places = np.arange(self.length)
        begins = np.array([0, *np.sort(chooser.choice(np.arange(4, self.length), 2, replace=False))])
        segments = (places[:, None] >= begins[1:]).sum(1)
        positions = places - begins[segments]
        weight = (positions > 1) & (np.roll(positions, -1) != 0) & (segments < (2 if index % 3 else 1))
        old, engine = -np.log(self.vocabulary) + 0.5 * chooser.normal(size=(2, self.length))
        return {
            "tokens": chooser.integers(0, self.vocabulary, self.length),
            "weight": weight.astype(np.float32),
            "segments": segments,
            "positions": positions,
            "advantage": chooser.normal(size=3)[segments],
            "truncated": (chooser.random(3) < 0.3)[segments].astype(np.float32),
            "old_logprobs": old,
            "rollout_logprobs": engine,
        }


class Sequences:
    """Seeded tokens; `masked`: several documents a sequence, kept apart, some tokens and some whole rows unlearned."""

    def __init__(self, *, count: int = 64, length: int = 32, vocabulary: int = 256, masked: bool = False):
        self.count, self.length, self.vocabulary, self.masked = count, length, vocabulary, masked

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        chooser = np.random.default_rng([7, index])
        # Some tokens are common, as in a language, so that experts have very different loads.
        drawn = (self.vocabulary * chooser.random(self.length + 1) ** 2).astype(np.int64)
        sample = {"tokens": drawn[:-1], "labels": drawn[1:]}
        if not self.masked:
            return sample
        begins = chooser.random(self.length) < 0.12
        begins[0] = True
        segments = np.cumsum(begins) - 1
        positions = np.arange(self.length) - np.flatnonzero(begins)[segments]
        weight = (chooser.random(self.length) < chooser.random()).astype(np.float32) * (index % 5 != 3)
        return sample | {"segments": segments, "positions": positions, "weight": weight}


class Items:
    """Two pairs of answers a sequence, each a document with a prompt, and padding; a third of the rows has one pair.

    Args:
        field: name of a field of documents: 0 or 1.
    """

    def __init__(self, *, count: int = 64, length: int = 32, field: str | None = None):
        self.count, self.length, self.field = count, length, field

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        chooser = np.random.default_rng([17, index])
        sizes = chooser.integers(2, self.length // 4 + 1, 2 if index % 3 == 2 else 4)
        starts = np.append(0, np.cumsum(sizes))
        places = np.arange(self.length)
        segments = np.searchsorted(starts[1:], places, side="right")
        positions = places - starts[segments]
        prompts = np.append([chooser.integers(0, size) for size in sizes], self.length)
        sample = {
            "tokens": chooser.integers(0, 256, self.length),
            "labels": chooser.integers(0, 256, self.length),
            "weight": (positions >= prompts[segments]).astype(np.float32),
            "segments": segments,
            "positions": positions,
        }
        return sample | ({} if self.field is None else {self.field: chooser.integers(0, 2, 5)[segments]})

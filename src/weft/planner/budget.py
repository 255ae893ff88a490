"""Compute-optimal sizes of models and data for a budget of FLOPs, by published scaling laws or those of own runs.

A law says which model and how many tokens reach the lowest loss with C FLOPs, where C = 6 N D for N parameters and D
tokens. Laws differ, because their data, tokenizers, schedules and ways to count parameters differ; so all are shown,
and the result is advice, not a prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.errors import UserError

PETAFLOP_DAY = 8.64e19


@dataclass(frozen=True)
class ParametricLaw:
    """Loss L(N, D) = E + A / N^alpha + B / D^beta, in nats per token (Hoffmann et al., 2022, approach 3)."""

    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Returns the loss, in nats per token."""
        return self.e + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def optimum(self, flops: float) -> tuple[float, float]:
        """Returns numbers of parameters and tokens of the lowest loss with `flops` = 6 N D."""
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        parameters = ratio * (flops / 6) ** (self.beta / (self.alpha + self.beta))
        return parameters, flops / 6 / parameters


@dataclass(frozen=True)
class Optimum:
    """The best use of a budget by one law.

    Attributes:
        law: name of the law.
        source: where it is published.
        parameters: number of parameters.
        tokens: number of training tokens.
        loss: nats per token on the law's own data; None if the law predicts none.
    """

    law: str
    source: str
    parameters: float
    tokens: float
    loss: float | None = None

    @property
    def tokens_per_parameter(self) -> float:
        """Tokens divided by parameters."""
        return self.tokens / self.parameters


@dataclass(frozen=True)
class Advice:
    """Learning rate and batch size that a published rule recommends for a budget.

    Attributes:
        rule: name of the rule.
        source: where it is published.
        learning_rate: peak learning rate of AdamW.
        batch_tokens: tokens of the global batch.
    """

    rule: str
    source: str
    learning_rate: float
    batch_tokens: float


CHINCHILLA = ParametricLaw(e=1.69, a=406.4, b=410.7, alpha=0.34, beta=0.28)
# The same 245 runs, fitted again: the published fit minimized a mean over runs that had not converged.
REPLICATION = ParametricLaw(e=1.8172, a=482.01, b=2085.43, alpha=0.3478, beta=0.3658)


def _by_tokens(tokens: Callable[[float], float]) -> Callable[[float], tuple[float, float]]:
    return lambda flops: (flops / 6 / tokens(flops), tokens(flops))


def _deepseek(flops: float) -> tuple[float, float]:
    """Model scale M is non-embedding FLOPs per token, with those of attention: M / 6 counts slightly too many."""
    return 0.1715 * flops**0.5243 / 6, 5.8316 * flops**0.4757


def _kaplan(flops: float) -> tuple[float, float]:
    """N counts no embeddings."""
    parameters = 1.3e9 * (flops / PETAFLOP_DAY) ** 0.73
    return parameters, flops / 6 / parameters


_LAWS: list[tuple[str, str, Callable[[float], tuple[float, float]], ParametricLaw | None]] = [
    ("chinchilla-1", "Hoffmann et al., 2022, approach 1: 20.2 tokens per parameter at 1B", _by_tokens(
        lambda flops: 20.2e9 * (flops / 1.21e20) ** 0.5), None),
    ("chinchilla-3", "Hoffmann et al., 2022, approach 3: parametric fit as published", CHINCHILLA.optimum, CHINCHILLA),
    ("replication", "Besiroglu et al., 2024: approach 3 fitted again", REPLICATION.optimum, REPLICATION),
    ("llama-3", "Llama 3, 2024: tokens 0.299 C^0.537", _by_tokens(lambda flops: 0.299 * flops**0.537), None),
    ("deepseek", "DeepSeek LLM, 2024: FLOPs per token 0.1715 C^0.5243", _deepseek, None),
    ("kaplan", "Kaplan et al., 2020: without embeddings; one schedule for all lengths", _kaplan, None),
]  # fmt: skip
# Laws whose range is the spread: that of Kaplan et al. is known to be biased by its learning rate schedules.
TRUSTED = ("chinchilla-1", "chinchilla-3", "replication", "llama-3", "deepseek")


def optima(flops: float, own: ParametricLaw | None = None) -> list[Optimum]:
    """Returns the compute-optimal sizes of a budget by each law.

    Args:
        flops: FLOPs of the whole training.
        own: a law that was fitted to the user's own runs, which comes first.

    Raises:
        UserError: the budget is not between 1e15 and 1e30 FLOPs.
    """
    if not 1e15 <= flops <= 1e30:
        raise UserError(
            f"--budget: {flops:g} FLOPs is outside of 1e15 to 1e30; give FLOPs of the whole training, as 1e22"
        )
    laws = [("own", "fitted to your runs", own.optimum, own)] if own is not None else []
    found = []
    for name, source, optimum, law in [*laws, *_LAWS]:
        parameters, tokens = optimum(flops)
        found.append(Optimum(name, source, parameters, tokens, law.loss(parameters, tokens) if law else None))
    return found


def spread(found: Sequence[Optimum]) -> tuple[Optimum, Optimum, float]:
    """Returns the smallest and the largest model of the trusted laws, and the geometric mean of their parameters."""
    chosen = sorted((one for one in found if one.law in TRUSTED), key=lambda one: one.parameters)
    mean = math.exp(sum(math.log(one.parameters) for one in chosen) / len(chosen))
    return chosen[0], chosen[-1], mean


def advice(flops: float, parameters: float, tokens: float) -> list[Advice]:
    """Returns learning rates and batch sizes by published rules, for dense models trained with AdamW.

    Args:
        flops: FLOPs of the whole training.
        parameters: number of parameters, without embeddings.
        tokens: number of training tokens.
    """
    return [
        Advice("deepseek", "DeepSeek LLM, 2024", 0.3118 * flops**-0.1250, 0.2920 * flops**0.3271),
        Advice("step-law", "Li et al., 2025", 1.79 * parameters**-0.713 * tokens**0.307, 0.58 * tokens**0.571),
    ]

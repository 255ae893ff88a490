"""Chooses new tokens from logits."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from weft.generation.constraints import Constraint
from weft.generation.settings import Sampling

FORBIDDEN = "logit_bias and the other settings forbid every token; allow at least one token where the text can go on"
NOT_FINITE = "the model's logits are NaN or infinite; check the weights of the model and of the adapter, or the dtype"


class Choice(NamedTuple):
    """A new token.

    Attributes:
        token: the token's id.
        logprob: the log-probability of the token in nats; None if `Sampling.logprobs` is None.
        top: (id, log-probability) of the most likely tokens, the most likely first.
        failure: the reason why no token could be chosen, as a message, or None.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    failure: str | None = None


class Context(NamedTuple):
    """What the choice of a sequence's next token depends on, besides the logits.

    Attributes:
        sampling: the settings.
        generator: the sequence's random generator.
        prompt: token ids of the prompt.
        new: token ids of the continuation.
        allowed: ids that are allowed as the next token; None: all.
        constraint: decides from `new` which tokens are allowed; None: all.
    """

    sampling: Sampling
    generator: torch.Generator
    prompt: Sequence[int]
    new: Sequence[int]
    allowed: Collection[int] | None = None
    constraint: Constraint | None = None


def new_generator(seed: int, copy: int, prompt: Sequence[int]) -> torch.Generator:
    """Creates the random generator of a continuation.

    Args:
        copy: number of earlier continuations of the same prompt.
    """
    key = hashlib.sha256(repr((seed, copy, tuple(prompt))).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "little"))


def choose(logits: torch.Tensor, contexts: Sequence[Context]) -> list[Choice]:
    """Returns the next token of each sequence. A sequence's result does not depend on the other sequences.

    Args:
        logits: `[sequences, vocab]`.
        contexts: the context of each sequence.
    """
    changed = process(logits, contexts)
    failures = find_failures(logits, changed)

    def draw_some(some: torch.Tensor, rows: list[int], settings: tuple) -> torch.Tensor:
        uniform = torch.stack([next_uniform(contexts[row].generator) for row in rows])
        return draw(some, uniform.to(logits.device), *settings)

    tokens = choose_ids(changed, contexts, draw_some)
    choices = with_logprobs(logits, tokens, [context.sampling for context in contexts])
    return [Choice(0, failure=failures[row]) if row in failures else choice for row, choice in enumerate(choices)]


def choose_ids(
    processed: torch.Tensor,
    contexts: Sequence[Context],
    draw_some: Callable[[torch.Tensor, list[int], tuple], torch.Tensor],
) -> list[int]:
    """Returns a token for each row: with temperature 0 the most likely token, otherwise a result of `draw_some`.

    Args:
        processed: the result of `process`, `[sequences, vocab]`.
        contexts: the context of each row.
        draw_some: called once for all rows with the same sampling arguments of `draw`, with these rows
            `[rows, vocab]`, their indices and the arguments (temperature, top_k, top_p, min_p). Returns tokens
            `[rows]`.
    """
    alike: dict[tuple, list[int]] = defaultdict(list)
    for row, context in enumerate(contexts):
        s = context.sampling
        alike[(0.0,) if s.temperature == 0 else (s.temperature, s.top_k, s.top_p, s.min_p)].append(row)
    tokens = [0] * len(contexts)
    for settings, rows in alike.items():
        some = processed if len(alike) == 1 else processed[rows]
        chosen = some.argmax(-1) if settings == (0.0,) else draw_some(some, rows, settings)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            tokens[row] = token
    return tokens


def find_failures(logits: torch.Tensor, processed: torch.Tensor) -> dict[int, str]:
    """Returns for each row from which no token can be chosen the reason, as a message.

    Args:
        logits: the model's logits, `[sequences, vocab]`.
        processed: the result of `process` for these logits.
    """
    failures = {}
    for row, largest in enumerate(processed.amax(-1).tolist()):
        if not math.isfinite(largest):
            finite = math.isfinite(logits[row].amax().item())
            failures[row] = FORBIDDEN if finite else NOT_FINITE
    return failures


def next_uniform(generator: torch.Generator) -> torch.Tensor:
    """Returns a random number in [0, 1), float64 `[]`."""
    return torch.rand((), generator=generator, dtype=torch.float64)


def process(logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
    """Returns the logits `[sequences, vocab]` after bias and penalties. Tokens that are not allowed get -infinity."""
    plain = [
        not (c.sampling.penalizes or c.sampling.logit_bias) and c.allowed is None and c.constraint is None
        for c in contexts
    ]
    if all(plain):
        return logits
    logits = logits.clone()
    for row, context in enumerate(contexts):
        if not plain[row]:
            logits[row] = _process_row(logits[row], context)
    return logits


def _process_row(logits: torch.Tensor, context: Context) -> torch.Tensor:
    sampling, device = context.sampling, logits.device
    if context.allowed is not None:
        keep = torch.tensor(sorted(context.allowed), device=device)
        logits = torch.full_like(logits, float("-inf")).index_copy_(0, keep, logits[keep])
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=device)
        amounts = torch.tensor(list(sampling.logit_bias.values()), dtype=logits.dtype, device=device)
        logits = logits.index_add(0, ids, amounts)
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor([*context.prompt, *context.new], device=device).unique()
        found = logits[seen]
        penalty = sampling.repetition_penalty
        logits = logits.index_copy(0, seen, torch.where(found > 0, found / penalty, found * penalty))
    if context.new and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = torch.tensor(list(context.new), device=device).unique(return_counts=True)
        amounts = sampling.presence_penalty + sampling.frequency_penalty * counts.to(logits.dtype)
        logits = logits.index_add(0, ids, -amounts)
    if context.constraint is not None:
        mask = context.constraint.mask(context.new)[: len(logits)].to(device)
        mask = torch.nn.functional.pad(mask, (0, len(logits) - len(mask)))  # a vocabulary can have unused ids
        logits = logits.masked_fill(~mask, float("-inf"))
    return logits


def with_logprobs(logits: torch.Tensor, tokens: Sequence[int], samplings: Sequence[Sampling]) -> list[Choice]:
    """Returns a `Choice` for each token, with log-probabilities where `Sampling.logprobs` is not None.

    Args:
        logits: `[tokens, vocab]`.
        tokens: ids of the tokens.
        samplings: the settings of each token.
    """
    choices = [Choice(token) for token in tokens]
    rows = [row for row, sampling in enumerate(samplings) if sampling.logprobs is not None]
    if rows:
        kept = logits[rows]
        divisors = [samplings[row].temperature if samplings[row].tempered_logprobs else 1.0 for row in rows]
        if set(divisors) != {1.0}:
            kept = kept / torch.tensor(divisors, dtype=kept.dtype, device=kept.device).unsqueeze(-1)
        logprobs = kept.log_softmax(-1)
        most = min(max(samplings[row].logprobs or 0 for row in rows), logits.shape[-1])
        values, ids = (x.tolist() for x in logprobs.topk(most, dim=-1))
        found = logprobs.gather(-1, torch.tensor([[tokens[row]] for row in rows], device=logprobs.device))
        for i, (row, logprob) in enumerate(zip(rows, found.flatten().tolist(), strict=True)):
            top = list(zip(ids[i], values[i], strict=True))[: samplings[row].logprobs]
            choices[row] = Choice(tokens[row], logprob, tuple(top))
    return choices


def draw(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None = None,
) -> torch.Tensor:
    """Returns tokens `[batch]` drawn from logits `[batch, vocab]`, by inverting the cumulative distribution.

    Args:
        uniform: a random number in [0, 1) for each sequence, `[batch]`.
    """
    mass, order, kept = _cumulative(logits, temperature, top_k, top_p, min_p)
    total = mass[:, -1:] if kept is None else mass.gather(-1, kept)
    chosen = invert(mass, uniform, total)
    return (chosen if order is None else order.gather(-1, chosen)).squeeze(-1)


def invert(mass: torch.Tensor, uniform: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Returns the first index at which each cumulative distribution exceeds `uniform * total`, `[batch, 1]`.

    Args:
        mass: cumulative weights, `[batch, candidates]`.
        uniform: a random number in [0, 1) for each row, `[batch]`.
        total: sum of the weights from which to draw, `[batch, 1]`.
    """
    return torch.searchsorted(mass, uniform.unsqueeze(-1) * total, right=True).clamp(max=mass.shape[-1] - 1)


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Returns the probabilities with which `choose` draws each token, float64 `[batch, vocab]`.

    Args:
        logits: `[batch, vocab]`, the result of `process`.
    """
    if sampling.temperature == 0:
        return torch.zeros_like(logits, dtype=torch.float64).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    mass, order, kept = _cumulative(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    each = mass.diff(dim=-1, prepend=mass.new_zeros(len(mass), 1))
    if kept is not None:
        each = each.masked_fill(torch.arange(each.shape[-1], device=each.device) > kept, 0.0)
    each = each / each.sum(-1, keepdim=True)
    return each if order is None else torch.zeros_like(logits, dtype=torch.float64).scatter_(-1, order, each)


def _cumulative(
    logits: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Returns the cumulative probabilities of the candidate tokens in each row of `logits` `[batch, vocab]`.

    Returns:
        Cumulative probabilities, float64 `[batch, candidates]`; the candidates' ids, in descending order of
        probability, or None if they are all ids in order; and the index `[batch, 1]` of the last candidate that can be
        drawn, or None.
    """
    order, top_p, min_p = None, None if top_p == 1 else top_p, min_p or None
    if top_k is not None and top_k < logits.shape[-1]:
        logits, order = logits.topk(top_k, dim=-1)  # descending
    elif top_p is not None or min_p is not None:
        logits, order = logits.sort(dim=-1, descending=True)
    logits = logits.to(torch.float64)
    # The maximum is subtracted, so that a temperature near 0 does not cause infinite logits.
    each = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    mass, kept = each.cumsum(-1), None  # [batch, candidates]
    if top_p is not None:
        kept = (mass < top_p * mass[:, -1:]).sum(-1, keepdim=True).clamp(max=mass.shape[-1] - 1)
    if min_p is not None:
        likely = (each >= min_p * each[:, :1]).sum(-1, keepdim=True) - 1
        kept = likely if kept is None else torch.minimum(kept, likely)
    return mass, order, kept

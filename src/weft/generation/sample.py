"""Continuing prompts, token by token."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from weft.config.model import ModelSection
from weft.errors import UserError
from weft.generation.cache import KVCache, windows_of
from weft.models.decoder import Decoder
from weft.models.layers.rope import rotary_changes_at, rotary_depends_on_length

CHUNK = 2048  # tokens of all prompts together in one forward: the memory it takes does not grow with the prompts


@dataclass(frozen=True)
class Sampling:
    """How new tokens are chosen, and how many at the most.

    Attributes:
        max_new_tokens: of each prompt, at least 1.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the smallest set of likeliest tokens with together at least this probability
            (Holtzman et al., 2020).
        seed: the same seed and prompt give the same tokens.

    Raises:
        UserError: a value out of range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}; give at least 1")
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature is {self.temperature}; give 0 (the likeliest token) or a finite number above")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}; give at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; give more than 0 and at most 1")


def generate_steps(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    stop_ids: Collection[int] = frozenset(),
    first: Sequence[Collection[int] | None] | None = None,
    copies: Sequence[int] | None = None,
    cache: bool = True,
) -> Iterator[list[int | None]]:
    """Continue several prompts at once, a token of each at every step.

    What a prompt gets depends on the seed and on the prompt, not on its neighbours: each draws from a generator of its
    own (the same prompt twice: two generators). The model is put into eval mode while this runs.

    Args:
        model: called as `model(tokens=, positions=, cache=)`, or without a cache `model(tokens=, positions=,
            segments=)`. A sharded one works when all ranks call this with the same arguments.
        prompts: token ids, at least one each; lengths may differ.
        stop_ids: tokens that end a prompt's continuation; they are yielded.
        first: for each prompt, the tokens of which its first new one is, or None for any.
        copies: for each prompt, how often it has been continued before: so often another generator is its own. Default:
            as often as it stands before it in `prompts`.
        cache: keep keys and values; without, every step computes everything again (for checking).

    Yields:
        A step's new token for each prompt, None for those that have ended. Ends when all have.

    Raises:
        UserError: an empty prompt, tokens that the model does not have, or more tokens than the model has learned
            positions for. At the call, before the first step is asked for.
    """
    check_prompts(model, prompts)
    check_length(model, max(map(len, prompts)) + sampling.max_new_tokens)
    sampler = Sampler(prompts, sampling, copies)
    return _generate(model, prompts, sampler, frozenset(stop_ids), first, cache)


def _generate(model, prompts, sampler, stop_ids, first, use_cache):
    was_training = model.training
    model.eval()
    try:
        yield from _steps(model, prompts, sampler, stop_ids, first, use_cache)
    finally:
        model.train(was_training)


def _steps(model, prompts, sampler, stop_ids, first, use_cache):
    device, max_new_tokens = next(model.parameters()).device, sampler.sampling.max_new_tokens
    width = max(map(len, prompts))
    starts = torch.tensor([width - len(p) for p in prompts])
    padded = bool(starts.any())
    # Rows end together: padding stands on the left, and every step appends one column to all rows.
    tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts]).to(device)  # [batch, width]
    starts = starts.to(device)
    use_cache = use_cache and getattr(model, "takes_cache", True)
    windows, config = windows_of(model), getattr(model, "config", None)
    scaling = config.rope_scaling if isinstance(config, ModelSection) else None

    def new_store() -> KVCache:
        return KVCache(width + max_new_tokens - 1, starts if padded else None, windows)

    store = new_store() if use_cache else None
    finished = [False] * len(prompts)
    fed = tokens
    # Not every model of others takes a prompt in pieces; nor do rotations that go by the length of all of it.
    if store is not None and windows is not None and not rotary_depends_on_length(scaling):
        *pieces, fed = tokens.split(max(1, CHUNK // len(prompts)), dim=1)
        for piece in pieces:
            next_logits(model, piece, store, starts, store.length + piece.shape[1])
    for step in range(max_new_tokens):
        logits = next_logits(model, fed, store, starts, step + width)
        if step == 0 and first is not None:
            logits = only(logits, first)
        new = sampler(logits, finished)
        yield [None if done else token for token, done in zip(new, finished, strict=True)]
        finished = [done or token in stop_ids for token, done in zip(new, finished, strict=True)]
        if all(finished):
            return
        column = torch.tensor(new, device=device).unsqueeze(1)
        tokens = torch.cat((tokens, column), dim=1)
        lengths = (len(prompt) + step + 1 for prompt, done in zip(prompts, finished, strict=True) if not done)
        if store is not None and any(rotary_changes_at(scaling, length) for length in lengths):
            store, fed = new_store(), tokens  # the keys so far were rotated in another way
        else:
            fed = tokens if store is None else column


def next_logits(
    model: nn.Module, tokens: torch.Tensor, cache: KVCache | None, starts: torch.Tensor, length: int
) -> torch.Tensor:
    """The last column's logits `[batch, vocab]`. `length`: columns with those in the cache."""
    # FSDP keeps what it gathers; tensors of inference mode would be of no use to the next training step.
    sharded = hasattr(model, "unshard")
    # Blocks compiled for training have fixed shapes; here every step has another.
    with torch.no_grad() if sharded else torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        columns = torch.arange(length - tokens.shape[1], length, device=tokens.device)
        positions = (columns.unsqueeze(0) - starts.unsqueeze(1)).clamp(min=0)
        last = {"last_only": True} if isinstance(model, Decoder) else {}
        if cache is not None:
            return model(tokens=tokens, positions=positions, cache=cache, **last)[:, -1]
        if hasattr(model, "takes_cache"):  # one of transformers: that rows begin with padding is told by a cache
            fresh = KVCache(length, starts if bool(starts.any()) else None)
            return model(tokens=tokens, positions=positions, cache=fresh)[:, -1]
        segments = (columns.unsqueeze(0) >= starts.unsqueeze(1)).long()
        return model(tokens=tokens, positions=positions, segments=segments, **last)[:, -1]


def only(logits: torch.Tensor, allowed: Sequence[Collection[int] | None]) -> torch.Tensor:
    """`[batch, vocab]` with minus infinity for what a row does not allow."""
    masked = logits.clone()
    for row, ids in enumerate(allowed):
        if ids is not None:
            keep = torch.tensor(sorted(ids), device=logits.device)
            masked[row] = float("-inf")
            masked[row, keep] = logits[row, keep]
    return masked


class Sampler:
    """Draws each row's next token from its own generator."""

    def __init__(self, prompts: Sequence[Sequence[int]], sampling: Sampling, copies: Sequence[int] | None = None):
        self.sampling = sampling
        self.generators = []
        for copy, prompt in zip(copies or earlier(map(tuple, prompts)), map(tuple, prompts), strict=True):
            key = hashlib.sha256(repr((sampling.seed, copy, prompt)).encode()).digest()
            self.generators.append(torch.Generator().manual_seed(int.from_bytes(key[:8], "little")))

    def __call__(self, logits: torch.Tensor, finished: Sequence[bool]) -> list[int]:
        """`[batch, vocab]` -> a token a row; rows that have finished draw nothing and get an arbitrary one."""
        if self.sampling.temperature == 0:
            return logits.argmax(-1).tolist()
        uniform = torch.tensor(
            [
                0.0 if done else torch.rand((), generator=g, dtype=torch.float64).item()
                for g, done in zip(self.generators, finished, strict=True)
            ],
            dtype=torch.float64,
        ).to(logits.device)
        return draw(logits, uniform, self.sampling.temperature, self.sampling.top_k, self.sampling.top_p).tolist()


def earlier(items: Iterable[Hashable]) -> list[int]:
    """For each item, how many like it stand before it."""
    seen: Counter[Hashable] = Counter()
    counts = []
    for item in items:
        counts.append(seen[item])
        seen[item] += 1
    return counts


def draw(
    logits: torch.Tensor, uniform: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> torch.Tensor:
    """Invert the cumulative distribution at `uniform` `[batch]` in [0, 1); `[batch, vocab]` -> tokens `[batch]`."""
    order = None
    if top_k is not None and top_k < logits.shape[-1]:
        logits, order = logits.topk(top_k, dim=-1)  # descending
    elif top_p is not None and top_p < 1:
        logits, order = logits.sort(dim=-1, descending=True)
    logits = logits.to(torch.float64)
    # Less the largest: divided by a temperature near 0 no logit becomes infinite.
    mass = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1).cumsum(-1)  # [batch, candidates]
    total = mass[:, -1:]
    if top_p is not None and top_p < 1:
        kept = (mass < top_p * total).sum(-1, keepdim=True).clamp(max=mass.shape[-1] - 1)  # the last one kept
        total = mass.gather(-1, kept)
    chosen = torch.searchsorted(mass, uniform.unsqueeze(-1) * total, right=True).clamp(max=mass.shape[-1] - 1)
    return (chosen if order is None else order.gather(-1, chosen)).squeeze(-1)


def check_prompts(model: nn.Module, prompts: Sequence[Sequence[int]]) -> None:
    """Raise UserError for a prompt without tokens, or with one that the model does not have."""
    if not prompts or not all(len(p) for p in prompts):
        raise UserError("a prompt without tokens; begin it with the end-of-document token")
    words = getattr(getattr(model, "config", None), "vocab_size", None)
    largest = max(map(max, prompts))
    if words is not None and largest >= words:
        raise UserError(
            f"a prompt has token {largest}, and the model's vocabulary ends at {words - 1}; this is not its tokenizer"
        )


def check_length(
    model: nn.Module,
    length: int,
    what: str = "prompt and new tokens are",
    remedy: str = "shorten the prompt or ask for fewer",
) -> None:
    """Raise UserError where the model cannot count that far; warn where it has only not learned to."""
    config = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or length <= limit:
        return
    if getattr(config, "position", None) == "learned" or getattr(model, "learned_positions", False):
        raise UserError(f"{what} {length} positions, the model has {limit}; {remedy}")
    warnings.warn(f"{length} positions; the model was made for {limit} (max_position_embeddings)", stacklevel=3)

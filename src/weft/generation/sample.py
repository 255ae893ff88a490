"""Sampling of token sequences."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from weft.config.model import ModelSection
from weft.errors import UserError
from weft.generation.cache import KVCache, sliding_windows
from weft.models.decoder import Decoder
from weft.models.layers.rope import rotary_changes_at, rotary_depends_on_length

CHUNK = 2048  # prompt tokens per forward, over all prompts: bounds the memory of long prompts


@dataclass(frozen=True)
class Sampling:
    """How new tokens are drawn, and how many.

    Attributes:
        max_new_tokens: per prompt, at least 1.
        temperature: divides the logits; 0: greedy decoding.
        top_k: draw from the k most likely tokens.
        top_p: draw from the smallest set of most likely tokens with at least this total probability
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
            raise UserError(f"temperature is {self.temperature}; give 0 (greedy decoding) or a finite number above")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}; give at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; give more than 0 and at most 1")


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts a model into eval mode for the block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


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
    """Continues a batch of prompts, one token of each per step. The model is in eval mode until the last step.

    The continuation of a prompt depends on the seed and the prompt, not on the batch: each prompt has its own random
    generator, and repeated prompts have different ones.

    Args:
        model: called as `model(tokens=, positions=, cache=)`, or without a cache `model(tokens=, positions=,
            segments=)`. With a sharded model, all ranks must call this with the same arguments.
        prompts: at least one token each; lengths may differ.
        stop_ids: tokens that end a continuation; they are yielded.
        first: per prompt, the tokens allowed as the first new one; None: any.
        copies: per prompt, how many equal prompts came before it, which selects its generator. Default: counted in
            `prompts`.
        cache: use a key-value cache; otherwise every step recomputes everything (for checking).

    Yields:
        The new token of each prompt; None for prompts that have ended. Stops when all have ended.

    Raises:
        UserError: an empty prompt, tokens outside the vocabulary, or more tokens than learned positions. Raised by the
            call, before the first step.
    """
    check_prompts(model, prompts)
    check_length(model, max(map(len, prompts)) + sampling.max_new_tokens)
    return _steps(model, prompts, Sampler(prompts, sampling, copies), frozenset(stop_ids), first, cache)


def _steps(model, prompts, sampler, stop_ids, first, use_cache):
    device, max_new_tokens = next(model.parameters()).device, sampler.sampling.max_new_tokens
    width = max(map(len, prompts))
    starts = torch.tensor([width - len(p) for p in prompts])
    padded = bool(starts.any())
    # Left padding, so that every step appends one column.
    tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts]).to(device)  # [batch, width]
    starts = starts.to(device)
    windows, config = sliding_windows(model), getattr(model, "config", None)
    scaling = config.rope_scaling if isinstance(config, ModelSection) else None

    def new_cache() -> KVCache:
        return KVCache(width + max_new_tokens - 1, starts if padded else None, windows)

    cache = new_cache() if use_cache and getattr(model, "takes_cache", True) else None
    finished = [False] * len(prompts)
    inputs = tokens
    with eval_mode(model):
        # A prompt is processed in chunks if the model is built in and its rotary embedding ignores the prompt's length.
        if cache is not None and windows is not None and not rotary_depends_on_length(scaling):
            *chunks, inputs = tokens.split(max(1, CHUNK // len(prompts)), dim=1)
            for chunk in chunks:
                next_logits(model, chunk, cache, starts, cache.length + chunk.shape[1])
        for step in range(max_new_tokens):
            logits = next_logits(model, inputs, cache, starts, step + width)
            if step == 0 and first is not None:
                logits = mask_logits(logits, first)
            new = sampler(logits, finished)
            yield [None if done else token for token, done in zip(new, finished, strict=True)]
            finished = [done or token in stop_ids for token, done in zip(new, finished, strict=True)]
            if all(finished):
                return
            column = torch.tensor(new, device=device).unsqueeze(1)
            tokens = torch.cat((tokens, column), dim=1)
            lengths = (len(prompt) + step + 1 for prompt, done in zip(prompts, finished, strict=True) if not done)
            if cache is not None and any(rotary_changes_at(scaling, length) for length in lengths):
                cache, inputs = new_cache(), tokens  # the cached keys have the previous rotary embedding
            else:
                inputs = tokens if cache is None else column


def next_logits(
    model: nn.Module, tokens: torch.Tensor, cache: KVCache | None, starts: torch.Tensor, length: int
) -> torch.Tensor:
    """Returns the last column's logits `[batch, vocab]`. `length`: columns including those in the cache."""
    # FSDP keeps what it all-gathers, and the next training step cannot use tensors of inference mode.
    sharded = hasattr(model, "unshard")
    # Layers compiled for training have fixed shapes; here every step has another shape.
    with torch.no_grad() if sharded else torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        columns = torch.arange(length - tokens.shape[1], length, device=tokens.device)
        positions = (columns.unsqueeze(0) - starts.unsqueeze(1)).clamp(min=0)
        last = {"last_only": True} if isinstance(model, Decoder) else {}
        if cache is not None:
            return model(tokens=tokens, positions=positions, cache=cache, **last)[:, -1]
        if hasattr(model, "takes_cache"):  # a Transformers model, which finds padding in a cache
            fresh = KVCache(length, starts if bool(starts.any()) else None)
            return model(tokens=tokens, positions=positions, cache=fresh)[:, -1]
        segments = (columns.unsqueeze(0) >= starts.unsqueeze(1)).long()
        return model(tokens=tokens, positions=positions, segments=segments, **last)[:, -1]


def mask_logits(logits: torch.Tensor, allowed: Sequence[Collection[int] | None]) -> torch.Tensor:
    """Sets logits `[batch, vocab]` of tokens that are not allowed in a sequence to minus infinity."""
    masked = logits.clone()
    for row, ids in enumerate(allowed):
        if ids is not None:
            keep = torch.tensor(sorted(ids), device=logits.device)
            masked[row] = float("-inf")
            masked[row, keep] = logits[row, keep]
    return masked


class Sampler:
    """Draws the next token of each sequence from the sequence's own generator."""

    def __init__(self, prompts: Sequence[Sequence[int]], sampling: Sampling, copies: Sequence[int] | None = None):
        self.sampling = sampling
        self.generators = []
        for copy, prompt in zip(copies or count_earlier(map(tuple, prompts)), map(tuple, prompts), strict=True):
            key = hashlib.sha256(repr((sampling.seed, copy, prompt)).encode()).digest()
            self.generators.append(torch.Generator().manual_seed(int.from_bytes(key[:8], "little")))

    def __call__(self, logits: torch.Tensor, finished: Sequence[bool]) -> list[int]:
        """`[batch, vocab]` -> one token per sequence; finished sequences draw no number and get an arbitrary token."""
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


def count_earlier(items: Iterable[Hashable]) -> list[int]:
    """Returns for each item the number of equal items before it."""
    seen: Counter[Hashable] = Counter()
    counts = []
    for item in items:
        counts.append(seen[item])
        seen[item] += 1
    return counts


def draw(
    logits: torch.Tensor, uniform: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> torch.Tensor:
    """Inverts the cumulative distribution at `uniform` `[batch]` in [0, 1); `[batch, vocab]` -> tokens `[batch]`."""
    order = None
    if top_k is not None and top_k < logits.shape[-1]:
        logits, order = logits.topk(top_k, dim=-1)  # descending
    elif top_p is not None and top_p < 1:
        logits, order = logits.sort(dim=-1, descending=True)
    logits = logits.to(torch.float64)
    # The maximum is subtracted so that a temperature near 0 makes no logit infinite.
    mass = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1).cumsum(-1)  # [batch, candidates]
    total = mass[:, -1:]
    if top_p is not None and top_p < 1:
        kept = (mass < top_p * total).sum(-1, keepdim=True).clamp(max=mass.shape[-1] - 1)  # the last one kept
        total = mass.gather(-1, kept)
    chosen = torch.searchsorted(mass, uniform.unsqueeze(-1) * total, right=True).clamp(max=mass.shape[-1] - 1)
    return (chosen if order is None else order.gather(-1, chosen)).squeeze(-1)


def check_prompts(model: nn.Module, prompts: Sequence[Sequence[int]]) -> None:
    """Raises UserError for an empty prompt, or for a token outside the model's vocabulary."""
    if not prompts or not all(len(p) for p in prompts):
        raise UserError("a prompt without tokens; begin it with the end-of-document token")
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    largest = max(map(max, prompts))
    if size is not None and largest >= size:
        raise UserError(
            f"a prompt has token {largest}, and the model's vocabulary ends at {size - 1}; give the model's tokenizer"
        )


def check_length(
    model: nn.Module,
    length: int,
    what: str = "prompt and new tokens are",
    remedy: str = "shorten the prompt or ask for fewer",
) -> None:
    """Raises UserError if the model has too few learned positions; warns if it was only trained on fewer."""
    config = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or length <= limit:
        return
    if getattr(config, "position", None) == "learned" or getattr(model, "learned_positions", False):
        raise UserError(f"{what} {length} positions, the model has {limit}; {remedy}")
    warnings.warn(f"{length} positions; the model was made for {limit} (max_position_embeddings)", stacklevel=3)

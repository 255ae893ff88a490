"""Generates tokens with a model, greedily or by sampling."""

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

CHUNK = 2048  # maximum prompt tokens of all prompts per forward pass, which limits the memory of long prompts


@dataclass(frozen=True)
class Sampling:
    """Settings of generation: the number of new tokens, and how they are chosen.

    Attributes:
        max_new_tokens: maximum number of new tokens per prompt, at least 1.
        temperature: divisor of the logits; 0: greedy decoding.
        top_k: number of most likely tokens from which a token is drawn; None: all.
        top_p: draw from the smallest set of most likely tokens whose total probability is at least this value
            (Holtzman et al., 2020); None: all tokens.
        seed: seed of the random numbers. The same seed and prompt give the same tokens.

    Raises:
        UserError: a value is out of range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}; set it to at least 1")
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"temperature is {self.temperature}; set it to 0 (greedy decoding) or a finite number above 0"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}; set it to at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; set it to a number above 0, at most 1")


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts a model into eval mode in the block, and restores its mode afterwards."""
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
    """Continues a batch of prompts. Each step generates one token of every prompt.

    The model is in eval mode until the last step. The continuation of a prompt depends on the seed and the prompt, but
    not on the batch, because each prompt has its own random generator. Repeated prompts have different generators.

    Args:
        model: the model. It is called as `model(tokens=, positions=, cache=)` or, without a cache, as
            `model(tokens=, positions=, segments=)`. If it is sharded, all ranks must call this function with the same
            arguments.
        prompts: token ids of each prompt, at least one. The lengths can differ.
        stop_ids: tokens that end a continuation. They are yielded too.
        first: tokens that are allowed as the first new token of each prompt; None: any token.
        copies: number of equal prompts before each prompt, which selects the prompt's random generator. Default:
            counted in `prompts`.
        cache: whether to use a key-value cache. Without a cache every step recomputes all tokens, which serves for
            tests.

    Yields:
        The new token of each prompt; None for prompts that have ended. Stops when all prompts have ended.

    Raises:
        UserError: a prompt is empty, a token is outside the vocabulary, or the model has too few learned positions. The
            error is raised by the call, before the first step.
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
    """Returns the logits of the last position, `[batch, vocab]`.

    Args:
        tokens: ids to process `[batch, seq]`, without the tokens that are already in the cache.
        starts: number of padding tokens at the beginning of each sequence.
        length: number of tokens per sequence, including padding and the tokens in the cache.
    """
    # FSDP keeps the parameters that it all-gathers, and training cannot use tensors created in inference mode.
    sharded = hasattr(model, "unshard")
    # Layers compiled for training have fixed shapes, but in generation every step has another shape.
    with torch.no_grad() if sharded else torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        columns = torch.arange(length - tokens.shape[1], length, device=tokens.device)
        positions = (columns.unsqueeze(0) - starts.unsqueeze(1)).clamp(min=0)
        last = {"last_only": True} if isinstance(model, Decoder) else {}
        if cache is not None:
            return model(tokens=tokens, positions=positions, cache=cache, **last)[:, -1]
        if hasattr(model, "takes_cache"):  # a Transformers model, which gets the padding from a cache
            fresh = KVCache(length, starts if bool(starts.any()) else None)
            return model(tokens=tokens, positions=positions, cache=fresh)[:, -1]
        segments = (columns.unsqueeze(0) >= starts.unsqueeze(1)).long()
        return model(tokens=tokens, positions=positions, segments=segments, **last)[:, -1]


def mask_logits(logits: torch.Tensor, allowed: Sequence[Collection[int] | None]) -> torch.Tensor:
    """Returns logits `[batch, vocab]` in which tokens that are not allowed are minus infinity.

    Args:
        allowed: allowed tokens of each sequence; None: all tokens.
    """
    masked = logits.clone()
    for row, ids in enumerate(allowed):
        if ids is not None:
            keep = torch.tensor(sorted(ids), device=logits.device)
            masked[row] = float("-inf")
            masked[row, keep] = logits[row, keep]
    return masked


class Sampler:
    """Draws the next token of each sequence, with a separate random generator for each sequence."""

    def __init__(self, prompts: Sequence[Sequence[int]], sampling: Sampling, copies: Sequence[int] | None = None):
        self.sampling = sampling
        self.generators = []
        for copy, prompt in zip(copies or count_earlier(map(tuple, prompts)), map(tuple, prompts), strict=True):
            key = hashlib.sha256(repr((sampling.seed, copy, prompt)).encode()).digest()
            self.generators.append(torch.Generator().manual_seed(int.from_bytes(key[:8], "little")))

    def __call__(self, logits: torch.Tensor, finished: Sequence[bool]) -> list[int]:
        """Returns one token per sequence for logits `[batch, vocab]`.

        A finished sequence gets an arbitrary token, and its generator does not advance.
        """
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
    """Returns tokens `[batch]` drawn from logits `[batch, vocab]`, by inverting the cumulative distribution.

    Args:
        uniform: a random number in [0, 1) for each sequence, `[batch]`.
    """
    order = None
    if top_k is not None and top_k < logits.shape[-1]:
        logits, order = logits.topk(top_k, dim=-1)  # descending
    elif top_p is not None and top_p < 1:
        logits, order = logits.sort(dim=-1, descending=True)
    logits = logits.to(torch.float64)
    # The maximum is subtracted, so that a temperature near 0 does not cause infinite logits.
    mass = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1).cumsum(-1)  # [batch, candidates]
    total = mass[:, -1:]
    if top_p is not None and top_p < 1:
        kept = (
            (mass < top_p * total).sum(-1, keepdim=True).clamp(max=mass.shape[-1] - 1)
        )  # the last candidate that is kept
        total = mass.gather(-1, kept)
    chosen = torch.searchsorted(mass, uniform.unsqueeze(-1) * total, right=True).clamp(max=mass.shape[-1] - 1)
    return (chosen if order is None else order.gather(-1, chosen)).squeeze(-1)


def check_prompts(model: nn.Module, prompts: Sequence[Sequence[int]]) -> None:
    """Raises UserError if a prompt is empty, or has a token outside the model's vocabulary."""
    if not prompts or not all(len(p) for p in prompts):
        raise UserError("a prompt has no tokens; begin it with the end-of-document token")
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    largest = max(map(max, prompts))
    if size is not None and largest >= size:
        raise UserError(
            f"a prompt has the token {largest}, but the model's last token is {size - 1}; use the model's tokenizer"
        )


def check_length(
    model: nn.Module,
    length: int,
    what: str = "prompt and new tokens are",
    remedy: str = "shorten the prompt or generate fewer tokens",
) -> None:
    """Checks that a model supports sequences of `length` tokens.

    Warns if `length` exceeds max_position_embeddings of a model without learned positions.

    Args:
        what, remedy: beginning and end of the error message.

    Raises:
        UserError: the model has fewer learned positions.
    """
    config = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or length <= limit:
        return
    if getattr(config, "position", None) == "learned" or getattr(model, "learned_positions", False):
        raise UserError(f"{what} {length} positions, but the model has only {limit}; {remedy}")
    warnings.warn(f"{length} positions, but the model was trained for {limit} (max_position_embeddings)", stacklevel=3)

"""Checks that prompts and caches fit the model and the memory."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import nn

from weft.config.model_sections import RopeScaling
from weft.data.tokenizers.tokenizer import Prompt, Tokenizer
from weft.errors import UserError
from weft.generation.cache import BLOCK
from weft.generation.runners import shards_of
from weft.generation.settings import Sampling
from weft.models.decoder import Decoder
from weft.models.layers.rope import rotary_depends_on_length
from weft.parallel.memory.free import free_memory
from weft.parallel.model_state import state_of
from weft.parallel.ranks import all_gather_object

SHARE = 0.5  # part of the free memory that a cache may take


def encode_prompt(
    prompt: str | Prompt | Sequence[int], sampling: Sampling, tokenizer: Tokenizer | None
) -> tuple[list[int], Collection[int] | None]:
    """Returns the token ids of a prompt, and the ids that its first new token can have (`Prompt.first`; None: all).

    Raises:
        UserError: a text or stop strings are given without a tokenizer.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError("texts need a tokenizer; pass token ids")
        prompt = tokenizer.prompt(prompt)
    if sampling.stop and tokenizer is None:
        raise UserError("stop strings need a tokenizer; use stop token ids")
    return (prompt.ids, prompt.first) if isinstance(prompt, Prompt) else (list(prompt), None)


def check_prompt(model: nn.Module, ids: Sequence[int]) -> None:
    """Raises UserError if a prompt is empty, or has a token outside the model's vocabulary."""
    if not ids:
        raise UserError("a prompt has no tokens; begin it with the end-of-document token")
    if (wrong := next((token for token in ids if not isinstance(token, Integral)), None)) is not None:
        raise UserError(f"a prompt of token ids has {wrong!r}; pass texts, or lists of integers")
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is not None and not 0 <= (token := max(ids, key=lambda t: t if t >= 0 else size - t)) < size:
        raise UserError(
            f"a prompt has the token id {token}, but the model has ids 0 to {size - 1}; use the model's tokenizer"
        )


def check_bias(model: nn.Module, biases: Mapping[int, float]) -> None:
    """Raises UserError if `Sampling.logit_bias` has a token outside the model's vocabulary."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is not None and biases and (token := max(biases)) >= size:
        raise UserError(f"logit_bias has the token id {token}, but the model has ids 0 to {size - 1}; remove this id")


def longest_text(model: nn.Module) -> int | None:
    """Returns the maximum number of tokens of a text for which a model is made; None: not limited or not known.

    This is `max_position_embeddings`, or the length to which `dynamic` or `yarn` scaling extends the original length,
    which config.json files give as max_position_embeddings.
    """
    config = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    scaling = getattr(config, "rope_scaling", None)
    if limit is not None and isinstance(scaling, RopeScaling) and scaling.rope_type in ("dynamic", "yarn"):
        limit = max(limit, int(scaling.factor * (scaling.original_max_position_embeddings or 0)))
    return limit


def check_length(model: nn.Module, length: int, what: str, remedy: str) -> None:
    """Checks that a model supports sequences of `length` tokens.

    Warns if `length` exceeds `longest_text` of a model without learned positions.

    Args:
        what, remedy: beginning and end of the error message.

    Raises:
        UserError: the model has fewer than `length` learned positions.
    """
    limit, config = longest_text(model), getattr(model, "config", None)
    if limit is None or length <= limit:
        return
    if getattr(config, "position", None) == "learned" or getattr(model, "learned_positions", False):
        raise UserError(f"{what} {length:,} positions, but the model has only {limit:,}; {remedy}")
    warnings.warn(
        f"sequences have {length} positions, but the model's max_position_embeddings is {limit}", stacklevel=3
    )


def check_prompts(
    model: nn.Module, prompts: Sequence[Sequence[int]], sampling: Sampling, room: int | None = None
) -> int | None:
    """Checks prompts of token ids, and returns the maximum number of tokens of each with its continuation; None: any.

    Args:
        room: number of tokens that the cache can hold; None: there is no cache.

    Raises:
        UserError: a prompt is empty, has tokens outside the vocabulary, or is too long for the model or the cache; or
            `Sampling.logit_bias` or `Sampling.max_length` does not fit the model.
    """
    check_bias(model, sampling.logit_bias)
    limit, new = sampling.max_length, sampling.max_new_tokens
    if limit is None:
        limit = longest_text(model)
    else:
        check_length(model, limit, "max_length needs", "lower max_length")
    for ids in prompts:
        check_prompt(model, ids)
    longest = max(map(len, prompts))
    if limit is not None and longest >= limit:
        raise UserError(
            f"{longest:,} prompt tokens and {new:,} new tokens do not fit in the model's maximum length of {limit:,} "
            "tokens, which leaves room for no new token; shorten the prompt, or set max_length if the model can "
            "continue longer texts"
        )
    length = longest + new if limit is None else min(longest + new, limit)
    if room is not None and length > room:
        raise UserError(
            f"{longest:,} prompt tokens and {length - longest:,} new tokens do not fit in the cache of {room:,} "
            "tokens; shorten the prompt, generate fewer tokens, or free memory"
        )
    return limit


def bytes_per_token(model: Decoder) -> int:
    """Returns the size of the cached keys and values of one token on this rank, in bytes."""
    config, ranks = model.config, shards_of(model)
    if config.mla is not None:
        width = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    else:
        width = 2 * max(1, config.kv_heads // ranks) * config.qk_head_dim
    return width * config.num_hidden_layers * next(model.parameters()).element_size()


def blocks_in_memory(model: Any, *others: Decoder) -> int:
    """Returns the number of cache blocks that fit in half of the free memory on a decoder's device.

    Ranks of a sharded decoder get the same number, because they must run the same steps.

    Args:
        others: other decoders, such as a draft model. Each has a cache with the same number of blocks.
    """
    sizes: dict[torch.device, float] = defaultdict(float)  # bytes of a block on each device
    for one in (model, *others):
        layers = one.config.num_hidden_layers
        for device in getattr(one, "layer_devices", None) or [next(one.parameters()).device] * layers:
            sizes[device] += bytes_per_token(one) * BLOCK / layers
    blocks = max(1, min(int(SHARE * free_memory(device) / size) for device, size in sizes.items()))
    return blocks if state_of(model) is None else min(all_gather_object(blocks))


def shares_blocks(scaling: RopeScaling | None, length: int) -> bool:
    """Whether a sequence of at most `length` tokens can share cache blocks: its length must not affect its keys."""
    if scaling is None or not rotary_depends_on_length(scaling):
        return True
    return length <= (scaling.original_max_position_embeddings or 0)

"""Dropout on a mesh: the same masks as on one process.

A micro-batch has a seed, and each layer a seed derived from it, so a pipeline stage draws what the full model would.
Ranks with a shard of a sequence draw the mask of the full sequence and index it (`Dropout.full_sequence`).

Masks of attention weights cover all heads, queries and keys, and are drawn in full too, on CPUs. On other devices the
attention kernels draw them: ranks of `tp` and `cp` draw the same numbers for their heads or queries, with the right
distribution, but not those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps

import torch
import torch.nn.functional as F
from torch import nn

from weft.models.decoder import Decoder
from weft.models.layers.attention import CoreAttention
from weft.models.layers.dropout import Dropout, FullSequence
from weft.parallel.model_state import ModelState

STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: spreads the seeds of layers
BITS = (1 << 63) - 1


def seed_layers(model: nn.Module, state: ModelState) -> nn.Module:
    """Seeds each layer from the seed that is set when the model is called.

    Assumes that activation checkpointing is inside, and restores the random state for recomputation.
    """
    if not isinstance(model, Decoder):
        return model
    config = model.config
    if not any((config.embedding_dropout, config.hidden_dropout, config.attention_dropout)):
        return model
    seed = [0]
    state.wrap(model, "dropout: keeps the micro-batch's seed", partial(_keeping, seed))
    for number, block in enumerate(model.layers):
        if block is not None:
            state.wrap(block, "dropout: the layer's seed", partial(_seeding, seed, number + 1))
    return model


def _keeping(seed: list[int], forward: Callable) -> Callable:
    @wraps(forward)
    def call(*arguments, **named):
        seed[0] = torch.initial_seed()
        return forward(*arguments, **named)

    return call


def _seeding(seed: list[int], number: int, forward: Callable) -> Callable:
    def call(*arguments, **named):
        torch.manual_seed((seed[0] + number * STRIDE) & BITS)
        return forward(*arguments, **named)

    return call


def draw_full_sequence(modules: Sequence[nn.Module], full_sequence: FullSequence) -> None:
    """Sets `Dropout.full_sequence` of all dropouts; for a sequence that is sharded twice, composes both."""
    for module in modules:
        if isinstance(module, Dropout):
            inner = module.full_sequence
            module.full_sequence = full_sequence if inner is None else partial(_composed, inner, full_sequence)


def _composed(inner: FullSequence, outer: FullSequence, tokens: int) -> tuple[int, torch.Tensor]:
    length, positions = inner(tokens)
    length, outer_positions = outer(length)
    return length, outer_positions[positions]


class WeightsDropout:
    """Dropout of attention weights where this rank computes some of the heads or queries.

    Args:
        module: `module.heads` are the heads of this rank.
        local_queries: number of local queries -> (number of all queries, positions of the local ones, positions of the
            keys in their order); None: this rank has all queries.
    """

    def __init__(
        self,
        module: CoreAttention,
        local_queries: Callable[[int], tuple[int, torch.Tensor, torch.Tensor]] | None = None,
    ):
        self.module, self.local_queries = module, local_queries

    def __call__(self, weights: torch.Tensor) -> torch.Tensor:
        """`[batch, heads, queries, keys]` -> `[batch, heads, queries, keys]`"""
        batch, _, queries, keys = weights.shape
        module = self.module
        ones = weights.new_ones(batch, module.num_heads, keys, keys)
        mask = F.dropout(ones, module.dropout)[:, module.heads]
        if self.local_queries is not None:
            _, positions, order = self.local_queries(queries)
            mask = mask[:, :, positions][..., order]
        return weights * mask

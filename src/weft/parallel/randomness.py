"""Makes dropout on a mesh draw the same masks as in a single process.

Each micro-batch has a seed, and each layer's seed is derived from the micro-batch's seed. So a pipeline stage draws the
same masks for its layers as the full model. A rank with a shard of a sequence draws the mask of the full sequence and
selects its own tokens (`Dropout.full_sequence`).

On CPUs, a rank also draws the dropout mask of attention weights for all heads, queries and keys, and selects its own
heads and queries. On other devices the attention kernels draw this mask. Then all `tp` and `cp` ranks draw the same
random numbers for their different heads or queries: the distribution is correct, but the masks differ from the masks of
a single process.
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
    """Makes each layer's forward start with its own seed, if the decoder or its adapter uses dropout.

    A layer's seed is derived from the layer's number and the micro-batch's seed, which is the seed of the random
    generator when the model's forward starts. Assumes that activation checkpointing is already applied: seeding must
    run outside of the checkpointed forward, because checkpointing itself restores the random state for recomputation.
    """
    if not isinstance(model, Decoder):
        return model
    config = model.config
    adapter = state.plan.adapter.dropout if state.plan.adapter is not None else 0.0
    if not any((config.embedding_dropout, config.hidden_dropout, config.attention_dropout, adapter)):
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
    """Sets `Dropout.full_sequence` of all `Dropout` modules in `modules`.

    If a module already has a `full_sequence` function, because sequences are sharded over two axes, the module gets the
    composition of both functions.
    """
    for module in modules:
        if isinstance(module, Dropout):
            inner = module.full_sequence
            module.full_sequence = full_sequence if inner is None else partial(_composed, inner, full_sequence)


def _composed(inner: FullSequence, outer: FullSequence, tokens: int) -> tuple[int, torch.Tensor]:
    length, positions = inner(tokens)
    length, outer_positions = outer(length)
    return length, outer_positions[positions]


class WeightsDropout:
    """Dropout of attention weights on a rank that computes only some of the heads or queries.

    Args:
        module: attention module; `module.heads` are the heads of this rank.
        local_queries: function from the number of this rank's queries to (number of all queries, positions of this
            rank's queries, positions of the keys in the order of the weights). None if this rank has all queries.
    """

    def __init__(
        self,
        module: CoreAttention,
        local_queries: Callable[[int], tuple[int, torch.Tensor, torch.Tensor]] | None = None,
    ):
        self.module, self.local_queries = module, local_queries

    def __call__(self, weights: torch.Tensor) -> torch.Tensor:
        """Applies dropout to attention weights `[batch, heads, queries, keys]`; returns the same shape."""
        batch, _, queries, keys = weights.shape
        module = self.module
        ones = weights.new_ones(batch, module.num_heads, keys, keys)
        mask = F.dropout(ones, module.dropout)[:, module.heads]
        if self.local_queries is not None:
            _, positions, order = self.local_queries(queries)
            mask = mask[:, :, positions][..., order]
        return weights * mask

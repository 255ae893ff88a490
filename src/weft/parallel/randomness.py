"""Dropout on a mesh: the numbers that one process draws.

A micro-batch has a seed, and each layer one that is made of it: so a stage of a pipeline draws what it would draw as a
part of the whole. Ranks that have some of a row's tokens draw for the whole row and take theirs
(`Dropout.full_sequence`).

Weights of attention have masks for all heads, queries and keys: on CPUs they are drawn whole, too. On other devices the
kernels draw their own, and ranks of `tp` and `cp` the same numbers, each for its heads or queries: as likely, but not
those of one process.
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

STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: seeds of layers and heads lie far apart
BITS = (1 << 63) - 1


def seed_layers(model: nn.Module, state: ModelState) -> nn.Module:
    """Have each layer draw from a seed of its own, made of the one that is set when the model is called.

    Assumes that activation checkpointing is inside: it draws again what was drawn.
    """
    if not isinstance(model, Decoder) or not any(_rates(model)):
        return model
    kept = [0]
    state.wrap(model, "dropout: keeps the micro-batch's seed", partial(_keeping, kept))
    for number, block in enumerate(model.layers):
        if block is not None:
            state.wrap(block, "dropout: the layer's seed", partial(_seeding, kept, number + 1))
    return model


def _keeping(kept: list[int], forward: Callable) -> Callable:
    @wraps(forward)
    def call(*arguments, **named):
        kept[0] = torch.initial_seed()
        return forward(*arguments, **named)

    return call


def _seeding(kept: list[int], number: int, forward: Callable) -> Callable:
    def call(*arguments, **named):
        torch.manual_seed(derived(kept[0], number))
        return forward(*arguments, **named)

    return call


def derived(seed: int, number: int) -> int:
    """A seed made of another one and a number."""
    return (seed + number * STRIDE) & BITS


def _rates(model: Decoder) -> tuple[float, float, float]:
    config = model.config
    return config.embedding_dropout, config.hidden_dropout, config.attention_dropout


def share_row(modules: Sequence[nn.Module], whole: FullSequence) -> None:
    """Say to dropouts that the tokens they see are a part of more; of what was said before, a part of a part."""
    for module in modules:
        if isinstance(module, Dropout):
            module.full_sequence = (
                whole if module.full_sequence is None else partial(_both, module.full_sequence, whole)
            )


def _both(inner: FullSequence, outer: FullSequence, length: int) -> tuple[int, torch.Tensor]:
    length, places = inner(length)
    length, further = outer(length)
    return length, further[places]


class WeightsDropout:
    """Dropout of attention's weights where this rank computes some of the heads, or of the queries.

    Args:
        module: whose weights they are; `heads` says which are here.
        rows: of some queries: the number of all, their places, and those of the keys in their order.
    """

    def __init__(
        self, module: CoreAttention, rows: Callable[[int], tuple[int, torch.Tensor, torch.Tensor]] | None = None
    ):
        self.module, self.rows = module, rows

    def __call__(self, weights: torch.Tensor) -> torch.Tensor:
        """`[batch, heads, queries, keys]` -> the same."""
        batch, _, queries, keys = weights.shape
        module = self.module
        ones = weights.new_ones(batch, module.num_heads, keys, keys)
        mask = F.dropout(ones, module.dropout)[:, module.heads]
        if self.rows is not None:
            _, places, order = self.rows(queries)
            mask = mask[:, :, places][..., order]
        return weights * mask

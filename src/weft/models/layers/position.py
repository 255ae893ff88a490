"""How queries and keys are turned by their positions: what a decoder hands to every block's attention."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from weft.config.model import ModelSection
from weft.models.layers.attention import Turn
from weft.models.layers.rope import rotary_cos_sin, rotate

Pair = tuple[torch.Tensor, torch.Tensor]


def turns_of(
    config: ModelSection,
    scheme: nn.Module | None,
    positions: torch.Tensor,
    dtype: torch.dtype,
    lengths: torch.Tensor | None = None,
) -> tuple[Turn | None, Turn | None]:
    """What positions do to queries and keys, in layers that see all and in those with a sliding window.

    Args:
        scheme: one of the user's own, made once a decoder. Without a `forward` it only embeds.
        positions: `[batch or 1, seq]`, each token's place in its document.
        dtype: of the model's computing.
        lengths: as `rotary_cos_sin`'s.
    """
    if scheme is not None:
        turns = type(scheme).forward is not nn.Module.forward
        own = partial(_by_scheme, scheme, positions) if turns else None
        return own, own
    if config.position != "rope":
        return None, None
    table = rotary_cos_sin(positions, config.rotary_dim, config.rope_theta, dtype, config.rope_scaling, lengths)
    turn = partial(_by_table, table)
    if config.sliding_window is None or config.rope_local_base_freq is None:
        return turn, turn
    local = rotary_cos_sin(positions, config.rotary_dim, config.rope_local_base_freq, dtype)
    return turn, partial(_by_table, local)


# Functions with names, which compiled blocks know again in every forward; tensors are all that changes.


def _by_table(table: Pair, q: torch.Tensor, k: torch.Tensor) -> Pair:
    return rotate(q, table), rotate(k, table)


def _by_scheme(scheme: nn.Module, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Pair:
    turned_q, turned_k = scheme(q, k, positions)
    return turned_q.to(q.dtype), turned_k.to(k.dtype)

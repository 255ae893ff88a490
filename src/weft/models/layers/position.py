"""Builds the rotary embedding that the decoder passes to the attention of every block."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from weft.config.model import ModelSection
from weft.models.layers.attention import Rotary
from weft.models.layers.rope import apply_rotary, rotary_cos_sin

Pair = tuple[torch.Tensor, torch.Tensor]


def rotary_embeddings(
    config: ModelSection,
    custom: nn.Module | None,
    positions: torch.Tensor,
    dtype: torch.dtype,
    lengths: torch.Tensor | None = None,
) -> tuple[Rotary | None, Rotary | None]:
    """Returns two functions that apply the rotary embedding: in full-attention layers, and in sliding-window layers.

    Both are None if the model has no rotary embedding.

    Args:
        config: the decoder's configuration.
        custom: the decoder's custom position component, or None. A component without `forward` only changes the token
            embeddings.
        positions: `[batch or 1, seq]`, each token's position in its document.
        dtype: dtype of the model's computation.
        lengths: `[batch]`, lengths of the full sequences if `positions` are shards of sequences.
    """
    if custom is not None:
        rotates = type(custom).forward is not nn.Module.forward
        rotary = partial(_call_custom, custom, positions) if rotates else None
        return rotary, rotary
    if config.position != "rope":
        return None, None
    table = rotary_cos_sin(positions, config.rotary_dim, config.rope_theta, dtype, config.rope_scaling, lengths)
    rotary = partial(_apply_table, table)
    if config.sliding_window is None or config.rope_local_base_freq is None:
        return rotary, rotary
    local = rotary_cos_sin(positions, config.rotary_dim, config.rope_local_base_freq, dtype)
    return rotary, partial(_apply_table, local)


# These functions are at module level because compiled blocks guard on the identity of functions. Only their tensor
# arguments change between forward passes.


def _apply_table(table: Pair, q: torch.Tensor, k: torch.Tensor) -> Pair:
    return apply_rotary(q, table), apply_rotary(k, table)


def _call_custom(custom: nn.Module, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Pair:
    rotated_q, rotated_k = custom(q, k, positions)
    return rotated_q.to(q.dtype), rotated_k.to(k.dtype)

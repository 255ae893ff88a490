"""Builds the rotary embedding that a decoder passes to every block's attention."""

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
    """The rotary embedding of layers with full attention, and of layers with a sliding window.

    Args:
        custom: the decoder's custom position component. Without a `forward` it only changes the token embeddings.
        positions: `[batch or 1, seq]`, each token's position in its document.
        dtype: of the model's computation.
        lengths: as `rotary_cos_sin`'s.
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


# Module-level functions: compiled blocks guard on their identity, and only the tensors change between forward passes.


def _apply_table(table: Pair, q: torch.Tensor, k: torch.Tensor) -> Pair:
    return apply_rotary(q, table), apply_rotary(k, table)


def _call_custom(custom: nn.Module, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Pair:
    rotated_q, rotated_k = custom(q, k, positions)
    return rotated_q.to(q.dtype), rotated_k.to(k.dtype)

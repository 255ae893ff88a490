"""Scaled dot-product attention: `attention` selects a fused kernel for its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeGuard, cast

import torch
import torch.nn.functional as F

from weft.kernels.blocked_attention import Window, blocked_attention, fits
from weft.kernels.cross_entropy import cap
from weft.kernels.document_attention import document_attention, run_starts, segment_mask
from weft.kernels.flash import FlashMask, flash_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Scores(NamedTuple):
    """Options for the computation of attention scores, except the mask.

    Attributes:
        scale: multiplier of the products of queries and keys; default: `1 / sqrt(head_dim)`.
        softcap: limit of the scaled scores, which `cross_entropy.cap` maps to (-softcap, softcap) before the mask.
        slopes: `[heads]`; slope x (query position - key position) is subtracted from each score (`alibi_slopes`).
        sinks: `[heads]`, score of an extra key that takes part in the softmax but has no value (Xiao et al., 2023).
    """

    scale: float | None = None
    softcap: float | None = None
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


PLAIN = Scores()


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    mask: torch.Tensor | BlockMask | FlashMask | Window | None = None,
    dropout: float | Callable[[torch.Tensor], torch.Tensor] = 0.0,
    scores: Scores = PLAIN,
) -> torch.Tensor:
    """Computes softmax(scale x q k^T + mask) v (Vaswani et al., 2017), with grouped queries (Ainslie et al., 2023).

    Args:
        q: `[batch, heads, seq, head_dim]`.
        k: `[batch, kv_heads, keys, head_dim]`; `kv_heads` must divide `heads`.
        v: `[batch, kv_heads, keys, v_head_dim]`; `v_head_dim` must not exceed `head_dim`.
        causal: whether a query sees only its own key and earlier keys. If there are fewer queries than keys, they
            belong to the last tokens. Ignored if `mask` is given.
        mask: a bool tensor that broadcasts to `[batch, heads, seq, keys]`, true where a query sees a key; or a mask
            made by `attention_mask`, whose form selects the kernel. A float mask is added to the scores. It must
            include ALiBi's biases, because `scores.slopes` is then ignored.
        dropout: probability of dropping an attention weight, or a function that is applied to the weights
            `[batch, heads, seq, keys]`. The caller passes 0 outside of training. A `BlockMask` supports only 0.
        scores: scale, soft-cap, slopes and sinks of the attention scores.

    Returns:
        `[batch, heads, seq, v_head_dim]`
    """
    queries, keys, grouped = q.shape[2], k.shape[2], q.shape[1] != k.shape[1]
    plain = scores.softcap is None and scores.sinks is None and not isinstance(mask, Window)
    blocked = not dropout and fits(q, k, v, plain=plain)
    if isinstance(mask := _supported(mask, dropout, scores), Window) and not blocked:
        mask = _window_mask(queries, keys, q.device, mask)
    elif blocked and ((mask is None and causal) or _is_segments(mask)):
        mask = Window(keys, None if mask is None else run_starts(mask))
    if isinstance(mask, torch.Tensor) and mask.is_floating_point():
        scores = scores._replace(slopes=None)
    if mask is not None and not isinstance(mask, (torch.Tensor, FlashMask, Window)):
        return _flex(q, k, v, mask, scores)
    if callable(dropout) or (not isinstance(mask, (FlashMask, Window)) and scores[1:] != (None, None, None)):
        return _unfused(q, k, v, mask, causal, dropout, scores)
    if v.shape[3] < q.shape[3]:  # the fused kernels need one head size for queries, keys and values
        padded = F.pad(v, (0, q.shape[3] - v.shape[3]))
        return attention(q, k, padded, causal=causal, mask=mask, dropout=dropout, scores=scores)[..., : v.shape[3]]
    if isinstance(mask, FlashMask):
        settings = {"scale": scores.scale, "softcap": scores.softcap, "slopes": scores.slopes}
        return flash_attention(q, k, v, mask, dropout=dropout, **settings)
    if isinstance(mask, Window):
        scale = q.shape[3] ** -0.5 if scores.scale is None else scores.scale
        return blocked_attention(q, k, v, scale, mask.first_keys(keys), scores.slopes, scores.softcap, scores.sinks)
    if _is_segments(mask):
        k, v = _repeat_kv(q, k, v)
        return document_attention(q, k, v, mask, scores.scale)[0]
    if mask is None and causal and 1 < queries < keys:
        mask = _causal_mask(queries, keys, q.device)
    # Without a mask the flash kernel skips the blocks above the diagonal; a boolean mask costs 1.7 times as much.
    is_causal = causal and mask is None and queries == keys
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scores.scale, enable_gqa=grouped
    )


def _is_segments(mask) -> TypeGuard[torch.Tensor]:
    """Whether a mask is the index of each token's document (see `attention_mask`)."""
    return isinstance(mask, torch.Tensor) and not mask.is_floating_point() and mask.dtype != torch.bool


def _supported(mask, dropout, scores: Scores):
    """Returns the mask in place of segments if `document_attention` does not support the other options."""
    if dropout and mask is not None and not isinstance(mask, (torch.Tensor, FlashMask, Window)):
        raise ValueError("flex attention has no dropout; give attention_mask the dropout, for another kernel")
    return segment_mask(mask) if _is_segments(mask) and (dropout or scores[1:] != (None, None, None)) else mask


def alibi_slopes(heads: int, bias_max: float, device: torch.device) -> torch.Tensor:
    """Returns ALiBi's slope of each head (Press et al., 2022), float32 `[heads]`.

    The slopes are 2^-(bias_max x i / n) for i from 1 to n, where n is the smallest power of two that is not less than
    `heads`. If n exceeds `heads`, the slopes with even i precede those with odd i, and the first `heads` slopes are
    returned, as in the implementation of Press et al.
    """
    powers = 2 ** math.ceil(math.log2(heads))
    slopes = torch.exp2(torch.arange(1, powers + 1, device=device, dtype=torch.float32) * (-bias_max / powers))
    return slopes if powers == heads else torch.cat((slopes[1::2], slopes[::2]))[:heads]


def _repeat_kv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `k` and `v`, with their heads repeated to match the number of heads of `q`."""
    repeats = q.shape[1] // k.shape[1]
    return (k, v) if repeats == 1 else (k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1))


def _causal_mask(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Returns the causal mask, bool `[queries, keys]`. The queries belong to the last `queries` of `keys` tokens."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _window_mask(queries: int, keys: int, device: torch.device, window: Window) -> torch.Tensor:
    """Returns the causal mask of a `Window`, bool, which broadcasts to `[batch, heads, queries, keys]`."""
    mask, first = _causal_mask(queries, keys, device), window.first_keys(keys)
    if first is None:
        return mask
    return mask & (torch.arange(keys, device=device) >= first[:, keys - queries :].to(device).unsqueeze(2)).unsqueeze(1)


def _unfused(q, k, v, mask, causal, dropout, how: Scores) -> torch.Tensor:
    """Computes attention and materializes all scores, for options that PyTorch's fused kernels do not support.

    These options are soft-cap, slopes and sinks (in `how`), and a function as `dropout`.
    """
    k, v = _repeat_kv(q, k, v)
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if how.scale is None else how.scale)
    queries, keys = scores.shape[2:]
    if how.softcap is not None:
        scores = cap(scores, how.softcap)
    if how.slopes is not None:
        positions = torch.arange(keys, device=q.device)
        distances = positions[keys - queries :].unsqueeze(1) - positions  # [queries, keys]
        scores = scores - how.slopes.to(scores.dtype).view(-1, 1, 1) * distances
    if mask is None and causal:
        mask = _causal_mask(queries, keys, q.device)
    if mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, float("-inf"))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if how.sinks is not None:
        sink = how.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(scores.shape[0], -1, queries, 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., :keys].to(v.dtype)
    weights = F.dropout(weights, dropout) if isinstance(dropout, float | int) else dropout(weights)
    return weights @ v


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, how: Scores) -> torch.Tensor:
    """Computes attention with FlexAttention (Dong et al., 2024). Compilation avoids materializing all scores."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    scale, softcap, slopes, sinks = how

    def modify(score, batch, head, query, key):
        if softcap is not None:
            score = cap(score, softcap)
        return score if slopes is None else score - slopes[head] * (query - key)

    call = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    score_mod = None if softcap is None and slopes is None else modify
    settings = {"block_mask": mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if sinks is None:
        return call(q, k, v, score_mod, **settings)
    out, aux = call(q, k, v, score_mod, **settings, return_aux=AuxRequest(lse=True))
    # A sink (an extra key with score s and no value) scales the weights of the other keys by sum / (sum + e^s).
    lse = cast(torch.Tensor, aux.lse)
    kept = torch.sigmoid(lse - sinks.to(lse.dtype).view(1, -1, 1))
    return out * kept.unsqueeze(-1).to(out.dtype)


@cache
def _compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)

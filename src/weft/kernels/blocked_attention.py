"""Causal attention as products of blocks of queries, on CPUs, where PyTorch's flash kernel is slower.

PyTorch's flash kernel for CPUs multiplies blocks with MKL, which has instructions for bfloat16 on Intel's processors
only. On an AMD EPYC (Zen 5), forward and backward take 22 ms of a core for 8 sequences of 256 tokens with 4 heads of
64, and the products of this module 9 ms. Like the flash kernel, it computes the scores of a block of queries at a time,
and again in backward. Unlike there, the scores of a block are in the dtype of the queries, and with a sliding window a
block of queries is multiplied with the keys of its windows only. So soft-caps and windows are faster in float32, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from weft.kernels.linear import onednn_is_faster
from weft.kernels.processor import features
from weft.kernels.torch_private import softmax_backward

BLOCK = 128  # queries whose scores are in memory at a time
LONG = 1024  # tokens from which a sliding window is faster in float32 than a mask of all tokens

# The processor decides, not a measurement: a resumed run must compute the same bits.
FASTER = onednn_is_faster() and "avx512_bf16" in features()

_SCORES = "float scale, int? window=None, Tensor? slopes=None, float? softcap=None"
_SIGNATURE = f"(Tensor q, Tensor k, Tensor v, {_SCORES}) -> Tensor"
_BACKWARD = f"(Tensor grad, Tensor q, Tensor k, Tensor v, {_SCORES}) -> (Tensor, Tensor, Tensor)"


class Window(NamedTuple):
    """A mask that stands for causal attention in which a query sees `size` keys, with its own."""

    size: int


def usable(device: torch.device, dtype: torch.dtype, *, plain: bool) -> bool:
    """Whether `blocked_attention` is faster for queries of this dtype on this device.

    Args:
        plain: whether attention has neither a soft-cap nor a sliding window in a long sequence. With these it is
            faster in float32, too: other kernels need all scores, or a mask of all tokens.
    """
    faster = dtype == torch.float32 and not plain
    return device.type == "cpu" and (faster or (FASTER and dtype == torch.bfloat16))


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object, softcap: float | None) -> bool:
    """Whether `blocked_attention` can compute causal attention, and is faster (`usable`)."""
    plain = softcap is None and not isinstance(mask, Window)
    if q.shape[2] != k.shape[2] or q.shape[2] == 1:
        return False
    own = type(q) is torch.Tensor and not torch.is_autocast_enabled("cpu")
    return own and all(usable(x.device, x.dtype, plain=plain) for x in (q, k, v))


@torch.library.custom_op("weft::blocked_attention", mutates_args=(), device_types="cpu", schema=_SIGNATURE)
def blocked_attention(q, k, v, scale, window=None, slopes=None, softcap=None):
    """Computes causal attention with grouped queries, a block of queries at a time.

    Args:
        q: `[batch, heads, seq, head_dim]`.
        k: `[batch, kv_heads, seq, head_dim]`.
        v: `[batch, kv_heads, seq, v_head_dim]`.
        scale: multiplier of the scores.
        window: number of keys that a query sees, with its own; None: all keys up to its own.
        slopes: `[heads]`, ALiBi's slopes, or None (see `weft.kernels.attention.Scores`). They get no gradient.
        softcap: limit of the scores, or None (see `Scores`).

    Returns:
        `[batch, heads, seq, v_head_dim]`
    """
    out = _empty(q, v)
    keys, values = k.flatten(0, 1), v.flatten(0, 1)
    for block, seen in _blocks(q.shape[2], window):
        mask = _mask(q, k, block, seen, window, slopes)
        weights, _ = _weights(_rows(q, block, k), keys[:, seen], scale, mask, softcap)
        out[:, :, block] = torch.bmm(weights, values[:, seen]).view(out[:, :, block].shape)
    return out


@torch.library.custom_op("weft::blocked_attention_backward", mutates_args=(), device_types="cpu", schema=_BACKWARD)
@torch.autocast("cpu", enabled=False)  # which the caller of backward can have enabled
def blocked_attention_backward(grad, q, k, v, scale, window=None, slopes=None, softcap=None):
    """Returns the gradients of q, k and v, in their shapes. `grad` is that of the result of `blocked_attention`."""
    grad_q = _empty(q, q)
    keys, values = k.flatten(0, 1), v.flatten(0, 1)
    # Later blocks add to the gradients of earlier keys: in float32, if there are several blocks.
    dtype = q.dtype if q.shape[2] <= BLOCK else torch.float32
    grad_k, grad_v = (x.new_zeros(x.shape, dtype=dtype) for x in (keys, values))  # contiguous, as compiled code expects
    for block, seen in _blocks(q.shape[2], window):
        queries, grads = _rows(q, block, k), _rows(grad, block, k)
        weights, capped = _weights(queries, keys[:, seen], scale, _mask(q, k, block, seen, window, slopes), softcap)
        grad_weights = torch.bmm(grads, values[:, seen].mT)
        grad_scores = softmax_backward(grad_weights, weights, -1, q.dtype)
        if capped is not None:
            grad_scores.addcmul_(grad_scores * capped, capped, value=-1)  # the derivative of tanh is 1 - tanh^2
        scaled = torch.baddbmm(queries, grad_scores, keys[:, seen], beta=0, alpha=scale)
        grad_q[:, :, block] = scaled.view(grad_q[:, :, block].shape)
        grad_k[:, seen] += torch.bmm(grad_scores.mT, queries)
        grad_v[:, seen] += torch.bmm(weights.mT, grads)
    return grad_q, grad_k.mul_(scale).to(k.dtype).view(k.shape), grad_v.to(v.dtype).view(v.shape)


def _blocks(seq: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Yields the slice of each block of queries, and the slice of the keys that its queries see."""
    for start in range(0, seq, BLOCK):
        end = min(start + BLOCK, seq)
        yield slice(start, end), slice(0 if window is None else max(0, start - window + 1), end)


def _mask(q, k, block: slice, seen: slice, window: int | None, slopes: torch.Tensor | None) -> torch.Tensor:
    """Returns what is added to the scores of `block`: -inf for hidden keys, and ALiBi's biases.

    Its shape broadcasts to `[batch x kv_heads, rows, keys]`, as the rows of `_rows`.
    """
    shift = block.start - seen.start
    every = torch.ones(block.stop - block.start, seen.stop - seen.start, dtype=torch.bool)
    hidden = every.triu(shift + 1)
    if window is not None:
        hidden |= every.tril_(shift - window)
    mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, float("-inf"))
    if slopes is None:
        return mask.repeat(q.shape[1] // k.shape[1], 1)  # once per head of a group
    distances = torch.arange(block.start, block.stop).unsqueeze(1) - torch.arange(seen.start, seen.stop)
    biases = mask - slopes.to(torch.float32).view(-1, 1, 1) * distances  # [heads, rows, keys]
    return biases.to(q.dtype).view(k.shape[1], -1, biases.shape[2]).repeat(k.shape[0], 1, 1)


def _rows(x: torch.Tensor, block: slice, k: torch.Tensor) -> torch.Tensor:
    """Returns a block of queries, with the heads of a group below each other, `[batch x kv_heads, rows, head_dim]`."""
    return x[:, :, block].reshape(k.shape[0] * k.shape[1], -1, x.shape[3])


def _weights(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, mask: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the attention weights of a block, and tanh(scores / softcap), or None without a soft cap.

    Both are `[batch x kv_heads, rows, keys]`.
    """
    if softcap is None:
        return torch.baddbmm(mask, queries, keys.mT, alpha=scale).softmax(-1), None
    capped = torch.baddbmm(mask, queries, keys.mT, beta=0, alpha=scale / softcap).tanh_()  # the mask is not added yet
    return torch.add(mask, capped, alpha=softcap).softmax(-1), capped


def _empty(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns a tensor `[batch, heads, seq, v_head_dim]` in which the heads of a token are neighbours in memory."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)


@blocked_attention.register_fake
def _(q, k, v, scale, window=None, slopes=None, softcap=None):
    return _empty(q, v)


@blocked_attention_backward.register_fake
def _(grad, q, k, v, scale, window=None, slopes=None, softcap=None):
    return _empty(q, q), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output):
    q, k, v, ctx.scale, ctx.window, slopes, ctx.softcap = inputs
    ctx.save_for_backward(q, k, v, slopes)


def _backward(ctx, grad):
    q, k, v, slopes = ctx.saved_tensors
    found = blocked_attention_backward(grad, q, k, v, ctx.scale, ctx.window, slopes, ctx.softcap)
    return *found, None, None, None, None


blocked_attention.register_autograd(_backward, setup_context=_setup_context)

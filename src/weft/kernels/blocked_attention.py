"""Causal attention in bfloat16 as products of oneDNN, on CPUs on which PyTorch's flash kernel is slower.

PyTorch's flash kernel for CPUs multiplies blocks with MKL, which has instructions for bfloat16 on Intel's processors
only. On an AMD EPYC (Zen 5), forward and backward take 22 ms of a core for 8 sequences of 256 tokens with 4 heads of
64, and the products of this module 9 ms. Like the flash kernel, it computes the scores of a block of queries at a time,
and again in backward. Unlike there, the scores of a block are rounded to bfloat16, and with a sliding window a block of
queries is multiplied with the keys of its windows only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from weft.kernels.linear import onednn_is_faster
from weft.kernels.processor import features
from weft.kernels.torch_private import softmax_backward

BLOCK = 128  # queries whose scores are in memory at a time

# The processor decides, not a measurement: a resumed run must compute the same bits.
FASTER = onednn_is_faster() and "avx512_bf16" in features()

_SIGNATURE = "(Tensor q, Tensor k, Tensor v, float scale, int? window=None) -> Tensor"
_BACKWARD = "(Tensor grad, Tensor q, Tensor k, Tensor v, float scale, int? window=None) -> (Tensor, Tensor, Tensor)"


class Window(NamedTuple):
    """A mask that stands for causal attention with a sliding window, which counts the query itself."""

    size: int


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `blocked_attention` is faster for queries of this dtype on this device."""
    return FASTER and dtype == torch.bfloat16 and device.type == "cpu"


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `blocked_attention` can compute causal attention, and is faster than PyTorch's flash kernel."""
    if q.shape[2] != k.shape[2] or q.shape[2] == 1:
        return False
    plain = type(q) is torch.Tensor and not torch.is_autocast_enabled("cpu")
    return plain and all(usable(x.device, x.dtype) for x in (q, k, v))


@torch.library.custom_op("weft::blocked_attention", mutates_args=(), device_types="cpu", schema=_SIGNATURE)
def blocked_attention(q, k, v, scale, window=None):
    """Computes causal attention with grouped queries, a block of queries at a time.

    Args:
        q: `[batch, heads, seq, head_dim]`.
        k: `[batch, kv_heads, seq, head_dim]`.
        v: `[batch, kv_heads, seq, v_head_dim]`.
        scale: multiplier of the scores.
        window: number of keys that a query sees, with its own; None: all keys up to its own.

    Returns:
        `[batch, heads, seq, v_head_dim]`
    """
    out = _empty(q, v)
    keys, values = k.flatten(0, 1), v.flatten(0, 1)
    for block, seen in _blocks(q.shape[2], window):
        weights = _weights(_rows(q, block, k), keys[:, seen], scale, _hidden(block, seen, window))
        out[:, :, block] = torch.bmm(weights, values[:, seen]).view(out[:, :, block].shape)
    return out


@torch.library.custom_op("weft::blocked_attention_backward", mutates_args=(), device_types="cpu", schema=_BACKWARD)
@torch.autocast("cpu", enabled=False)  # which the caller of backward can have enabled
def blocked_attention_backward(grad, q, k, v, scale, window=None):
    """Returns the gradients of q, k and v, in their shapes. `grad` is that of the result of `blocked_attention`."""
    grad_q = _empty(q, q)
    keys, values = k.flatten(0, 1), v.flatten(0, 1)
    # Later blocks add to the gradients of earlier keys: in float32, if there are several blocks.
    dtype = q.dtype if q.shape[2] <= BLOCK else torch.float32
    grad_k, grad_v = (x.new_zeros(x.shape, dtype=dtype) for x in (keys, values))  # contiguous, as compiled code expects
    for block, seen in _blocks(q.shape[2], window):
        queries, grads = _rows(q, block, k), _rows(grad, block, k)
        weights = _weights(queries, keys[:, seen], scale, _hidden(block, seen, window))
        grad_weights = torch.bmm(grads, values[:, seen].mT)
        grad_scores = softmax_backward(grad_weights, weights, -1, q.dtype)
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


def _hidden(block: slice, seen: slice, window: int | None) -> torch.Tensor:
    """Returns the keys of `seen` that the queries of `block` do not see, bool `[rows, keys]`."""
    every = torch.ones(block.stop - block.start, seen.stop - seen.start, dtype=torch.bool)
    shift = block.start - seen.start
    later = every.triu(shift + 1)
    return later if window is None else later.logical_or_(every.tril_(shift - window))


def _rows(x: torch.Tensor, block: slice, k: torch.Tensor) -> torch.Tensor:
    """Returns a block of queries, with the heads of a group below each other, `[batch x kv_heads, rows, head_dim]`."""
    return x[:, :, block].reshape(k.shape[0] * k.shape[1], -1, x.shape[3])


def _weights(queries: torch.Tensor, keys: torch.Tensor, scale: float, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the attention weights of a block, `[batch x kv_heads, rows, keys]`."""
    mask = torch.zeros(hidden.shape, dtype=keys.dtype).masked_fill_(hidden, float("-inf"))
    mask = mask.repeat(queries.shape[1] // len(mask), 1)  # once per head of a group
    return torch.baddbmm(mask, queries, keys.mT, alpha=scale).softmax(-1)


def _empty(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns a tensor `[batch, heads, seq, v_head_dim]` in which the heads of a token are neighbours in memory."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)


@blocked_attention.register_fake
def _(q, k, v, scale, window=None):
    return _empty(q, v)


@blocked_attention_backward.register_fake
def _(grad, q, k, v, scale, window=None):
    return _empty(q, q), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    return *blocked_attention_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.window), None, None


blocked_attention.register_autograd(_backward, setup_context=_setup_context)

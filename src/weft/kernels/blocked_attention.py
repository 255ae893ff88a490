"""Causal attention as products of blocks of queries, on CPUs, where PyTorch's flash kernel is slower.

PyTorch's flash kernel for CPUs multiplies blocks with MKL, which has instructions for bfloat16 on Intel's processors
only. On an AMD EPYC (Zen 5), forward and backward take 22 ms of a core for 8 sequences of 256 tokens with 4 heads of
64, and the products of this module 9 ms. Like the flash kernel, it computes the scores of a block of queries at a time,
and again in backward. Unlike there, the scores of a block are in the dtype of the queries, and a block of queries is
multiplied with the keys of its windows or documents only, in bfloat16 rounded to few lengths (`LENGTHS`). So soft-caps,
sinks and windows are faster in float32, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from weft.kernels.linear import onednn_is_faster
from weft.kernels.processor import features
from weft.kernels.torch_private import softmax_backward

BLOCK = 128  # queries whose scores are in memory at a time
LENGTHS = 32  # different numbers of keys in bfloat16: oneDNN compiles products for each, and keeps up to 1 MB of code
LONG = 1024  # tokens from which a sliding window is faster in float32 than a mask of all tokens

# The processor decides, not a measurement: a resumed run must compute the same bits.
FASTER = onednn_is_faster() and "avx512_bf16" in features()

_SCORES = "float scale, Tensor? starts=None, Tensor? slopes=None, float? softcap=None, Tensor? sinks=None"
_SIGNATURE = f"(Tensor q, Tensor k, Tensor v, {_SCORES}) -> Tensor"
_BACKWARD = f"(Tensor grad, Tensor q, Tensor k, Tensor v, {_SCORES}) -> (Tensor, Tensor, Tensor, Tensor)"


class Window(NamedTuple):
    """A mask that stands for causal attention in which a query sees at most `size` keys, with its own.

    Attributes:
        starts: the first key that each query sees, int64 `[batch, seq]`; None if it follows from `size`.
    """

    size: int
    starts: torch.Tensor | None = None

    def first_keys(self, seq: int) -> torch.Tensor | None:
        """Returns `starts`, or what follows from `size`, `[1, seq]`; None if each query sees all keys up to its own."""
        if self.starts is not None or self.size >= seq:
            return self.starts
        return (torch.arange(seq) + 1 - self.size).clamp_(min=0).unsqueeze(0)


class _Options(NamedTuple):
    """The arguments of `blocked_attention` after `scale`."""

    starts: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def usable(device: torch.device, dtype: torch.dtype, *, plain: bool) -> bool:
    """Whether `blocked_attention` is faster for queries of this dtype on this device.

    Args:
        plain: whether attention has neither a soft-cap nor sinks nor a mask of many tokens. With these it is faster in
            float32, too: other kernels need all scores, or a mask of all tokens.
    """
    faster = dtype == torch.float32 and not plain
    return device.type == "cpu" and (faster or (FASTER and dtype == torch.bfloat16))


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, plain: bool) -> bool:
    """Whether `blocked_attention` can compute causal attention, and is faster (`usable`)."""
    if q.shape[2] != k.shape[2] or q.shape[2] == 1 or q.shape[0] == 0:
        return False
    own = type(q) is torch.Tensor and not torch.is_autocast_enabled("cpu")
    return own and all(usable(x.device, x.dtype, plain=plain) for x in (q, k, v))


@torch.library.custom_op("weft::blocked_attention", mutates_args=(), device_types="cpu", schema=_SIGNATURE)
def blocked_attention(q, k, v, scale, starts=None, slopes=None, softcap=None, sinks=None):
    """Computes causal attention with grouped queries, a block of queries at a time.

    Args:
        q: `[batch, heads, seq, head_dim]`.
        k: `[batch, kv_heads, seq, head_dim]`.
        v: `[batch, kv_heads, seq, v_head_dim]`.
        scale: multiplier of the scores.
        starts: the first key that each query sees, int64 `[batch or 1, seq]`, which never decreases along a sequence;
            None: all keys up to its own.
        slopes: `[heads]`, ALiBi's slopes, or None (see `weft.kernels.attention.Scores`). They get no gradient.
        softcap: limit of the scores, or None (see `Scores`).
        sinks: `[heads]`, or None (see `Scores`).

    Returns:
        `[batch, heads, seq, v_head_dim]`
    """
    out = _empty(q, v)
    keys, values = k.flatten(0, 1), v.flatten(0, 1)
    options = _Options(starts, slopes, softcap, sinks)
    for block in _blocks(q, k, starts):
        weights = _weights(block, block.rows(q), keys[block.keys], scale, options)[0]
        target = out[block.queries]
        target.copy_(torch.bmm(weights, values[block.keys]).view(target.shape))
    return out


@torch.library.custom_op("weft::blocked_attention_backward", mutates_args=(), device_types="cpu", schema=_BACKWARD)
@torch.autocast("cpu", enabled=False)  # which the caller of backward can have enabled
def blocked_attention_backward(grad, q, k, v, scale, *options):
    """Returns the gradients of q, k, v and sinks, in their shapes; without sinks, the last has no elements.

    Args:
        grad: the gradient of the result of `blocked_attention`, whose arguments follow.
    """
    how = _Options(*options)
    grad_q = _empty(q, q)
    keys, values = k.flatten(0, 1), v.flatten(0, 1)
    # Later blocks add to the gradients of earlier keys: in float32, if there are several blocks.
    dtype = q.dtype if q.shape[2] <= BLOCK else torch.float32
    grad_k, grad_v = (x.new_zeros(x.shape, dtype=dtype) for x in (keys, values))  # contiguous, as compiled code expects
    grad_sinks = q.new_zeros(0 if how.sinks is None else len(how.sinks), dtype=torch.float32)
    for block in _blocks(q, k, how.starts):
        queries, grads, seen = block.rows(q), block.rows(grad), block.keys
        weights, capped, lost = _weights(block, queries, keys[seen], scale, how)
        grad_weights = torch.bmm(grads, values[seen].mT)
        if lost is not None:  # the sum of the weights' gradients, which the sink's gradient balances
            moved = (grad_weights * weights).sum(-1, keepdim=True, dtype=torch.float32).mul_(lost)
            grad_sinks -= moved.view(len(grads) // block.kv_heads, len(grad_sinks), -1).sum((0, 2))
        grad_scores = softmax_backward(grad_weights, weights, -1, q.dtype)
        if capped is not None:
            grad_scores.addcmul_(grad_scores * capped, capped, value=-1)  # the derivative of tanh is 1 - tanh^2
        target = grad_q[block.queries]
        target.copy_(torch.baddbmm(queries, grad_scores, keys[seen], beta=0, alpha=scale).view(target.shape))
        grad_k[seen] += torch.bmm(grad_scores.mT, queries)
        grad_v[seen] += torch.bmm(weights.mT, grads)
    grad_k, grad_v = grad_k.mul_(scale).to(k.dtype).view(k.shape), grad_v.to(v.dtype).view(v.shape)
    return grad_q, grad_k, grad_v, grad_sinks if how.sinks is None else grad_sinks.to(how.sinks.dtype)


class _Block(NamedTuple):
    """A block of queries of some sequences, and the keys that they see.

    Attributes:
        sequences: the sequences of the batch.
        tokens: the queries.
        seen: the keys, from the first that a query sees to the last query; in bfloat16 some more, for `LENGTHS`.
        first_keys: the first key that each query sees, `[queries]`; None: the first of the sequence.
        kv_heads: the number of heads of keys and values.
    """

    sequences: slice
    tokens: slice
    seen: slice
    first_keys: torch.Tensor | None
    kv_heads: int

    @property
    def queries(self) -> tuple[slice, slice, slice]:
        """The index of the queries in `[batch, heads, seq, ...]`."""
        return self.sequences, slice(None), self.tokens

    @property
    def keys(self) -> tuple[slice, slice]:
        """The index of the keys in `[batch x kv_heads, seq, ...]`."""
        return slice(self.sequences.start * self.kv_heads, self.sequences.stop * self.kv_heads), self.seen

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the queries with the heads of a group below each other, `[sequences x kv_heads, rows, head_dim]`."""
        x = x[self.queries]
        return x.reshape(x.shape[0] * self.kv_heads, -1, x.shape[3])

    def mask(self, dtype: torch.dtype, slopes: torch.Tensor | None, heads: int) -> torch.Tensor:
        """Returns what is added to the scores: -inf for hidden keys, and ALiBi's biases.

        Its shape broadcasts to `[sequences x kv_heads, rows, keys]`, as `rows`.
        """
        queries, keys = (torch.arange(x.start, x.stop) for x in (self.tokens, self.seen))
        hidden = keys > queries.unsqueeze(1)
        if self.first_keys is not None:
            hidden |= keys < self.first_keys.unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        if slopes is None:
            return mask.repeat(heads // self.kv_heads, 1)  # once per head of a group
        biases = mask - slopes.to(torch.float32).view(-1, 1, 1) * (queries.unsqueeze(1) - keys)  # [heads, rows, keys]
        count = self.sequences.stop - self.sequences.start
        return biases.to(dtype).view(self.kv_heads, -1, len(keys)).repeat(count, 1, 1)


def _blocks(q: torch.Tensor, k: torch.Tensor, starts: torch.Tensor | None) -> Iterator[_Block]:
    """Yields the blocks of all queries: of each sequence apart, if their first keys (`starts`) are not the same."""
    batch, seq = q.shape[0], q.shape[2]
    step = _step(seq, starts) if q.dtype == torch.bfloat16 else 1
    size = batch if starts is None or len(starts) == 1 else 1
    for sequence in range(0, batch, size):
        for start in range(0, seq, BLOCK):
            tokens = slice(start, min(start + BLOCK, seq))
            first_keys = None if starts is None else starts[sequence, tokens]
            first = 0 if first_keys is None else int(first_keys[0])
            seen = slice(first // step * step, min(-(-tokens.stop // step) * step, seq))
            yield _Block(slice(sequence, sequence + size), tokens, seen, first_keys, k.shape[1])


def _step(seq: int, starts: torch.Tensor | None) -> int:
    """Returns the multiple of tokens at which the keys of a block begin and end, for about `LENGTHS` lengths."""
    longest = seq
    if starts is not None:  # what a block sees decides: a short window of a long sequence keeps its few keys
        ends = torch.arange(BLOCK, seq + BLOCK, BLOCK).clamp_(max=seq)
        longest = int((ends - starts[:, ::BLOCK]).max())
    steps = -(-longest // (BLOCK * LENGTHS))
    return BLOCK << (steps - 1).bit_length()  # a power of two, so that batches have the same lengths


def _weights(
    block: _Block, queries: torch.Tensor, keys: torch.Tensor, scale: float, how: _Options
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Returns the attention weights of a block, tanh(scores / softcap), and the weights of the sinks.

    The first two are `[sequences x kv_heads, rows, keys]`, the last has one key. Each is None without its option.
    """
    groups, rows = len(queries) // block.kv_heads, block.tokens.stop - block.tokens.start
    mask = block.mask(queries.dtype, how.slopes, queries.shape[1] // rows * block.kv_heads)
    capped = None
    if how.softcap is None:
        scores = torch.baddbmm(mask, queries, keys.mT, alpha=scale)
    else:
        capped = torch.baddbmm(mask, queries, keys.mT, beta=0, alpha=scale / how.softcap).tanh_()  # without the mask
        scores = torch.add(mask, capped, alpha=how.softcap)
    if how.sinks is None:
        return scores.softmax(-1), capped, None
    column = how.sinks.to(scores.dtype).view(block.kv_heads, -1, 1).repeat_interleave(rows, 1).repeat(groups, 1, 1)
    weights = torch.cat((scores, column), -1).softmax(-1)
    return weights[..., :-1], capped, weights[..., -1:]


def _empty(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns a tensor `[batch, heads, seq, v_head_dim]` in which the heads of a token are neighbours in memory."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)


@blocked_attention.register_fake
def _(q, k, v, scale, starts=None, slopes=None, softcap=None, sinks=None):
    return _empty(q, v)


@blocked_attention_backward.register_fake
def _(grad, q, k, v, scale, *options):
    sinks = _Options(*options).sinks
    grad_sinks = q.new_empty(0, dtype=torch.float32) if sinks is None else torch.empty_like(sinks)
    return _empty(q, q), k.new_empty(k.shape), v.new_empty(v.shape), grad_sinks


def _setup_context(ctx, inputs, output):
    q, k, v, ctx.scale, starts, slopes, ctx.softcap, sinks = inputs
    ctx.save_for_backward(q, k, v, starts, slopes, sinks)


def _backward(ctx, grad):
    q, k, v, starts, slopes, sinks = ctx.saved_tensors
    options = _Options(starts, slopes, ctx.softcap, sinks)
    *found, grad_sinks = blocked_attention_backward(grad, q, k, v, ctx.scale, *options)
    return *found, None, None, None, None, None if sinks is None else grad_sinks


blocked_attention.register_autograd(_backward, setup_context=_setup_context)

"""Differentiable functions of each token's logits, computed in chunks of tokens, without materializing all logits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.kernels.autocast import as_autocast
from weft.kernels.cross_entropy import CHUNK_ELEMENTS, KEPT_ELEMENTS, Vocabulary, cap, head_gradients, slices
from weft.kernels.linear import matmul

# Logits per call of the function, on devices other than the CPU. The function can need several times their memory.
FUNCTION_ELEMENTS = 1 << 25

LogitsFunction = Callable[[torch.Tensor, slice], torch.Tensor]


def map_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    function: LogitsFunction,
    softcap: float | None = None,
    *,
    vocabulary: Vocabulary | None = None,
) -> torch.Tensor:
    """Returns a differentiable function of each token's logits, cap(hidden weight^T).

    `function(logits, tokens)` is called with chunks of tokens: their logits `[n, vocab]`, in at least float32, and the
    slice of the chunk in the flattened tokens. The function returns `[n]` or `[n, values]`, and each token's values
    must depend only on the token's logits. Backward calls the function again, so that logits are upcast, and
    intermediate results exist, only for one chunk at a time.

    The other arguments, and the dtype of the result, are as in `token_logprobs`.

    Returns:
        `[...]` or `[..., values]`, for `hidden` `[..., hidden]`.
    """
    flat, weight = as_autocast(hidden.reshape(-1, hidden.shape[-1]), weight)
    return _MapLogits.apply(flat, weight, hidden.shape[:-1], function, softcap, vocabulary)


class _MapLogits(torch.autograd.Function):
    """The autograd function of `map_logits`. It saves logits in the inputs' dtype, if they are few."""

    @staticmethod
    def forward(ctx, hidden, weight, shape, function, softcap, vocabulary):
        result, size = None, len(weight) if vocabulary is None else vocabulary.size
        blocks = list(slices(len(hidden), KEPT_ELEMENTS // len(weight)))
        for block in blocks:
            logits = matmul(hidden[block], weight.mT)
            for rows in _function_chunks(logits, size):
                found = function(cap(_full(logits[rows], vocabulary), softcap), _within(block, rows))
                if result is None:  # not a view: FSDP2 warns about views
                    result = found.new_empty(*shape, *found.shape[1:])
                result.view(-1, *found.shape[1:])[_within(block, rows)] = found
        ctx.save_for_backward(hidden, weight)
        ctx.kept = logits if len(blocks) == 1 else None
        ctx.function, ctx.softcap, ctx.vocabulary, ctx.size, ctx.dims = function, softcap, vocabulary, size, len(shape)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        gradient = gradient.flatten(0, ctx.dims - 1)
        kept, ctx.kept = ctx.kept, None
        first = 0 if ctx.vocabulary is None else ctx.vocabulary.first

        def overwrite(block, logits):
            for rows in _function_chunks(logits, ctx.size):
                tokens = _within(block, rows)
                full = _full(logits[rows], ctx.vocabulary).requires_grad_()
                with torch.enable_grad():
                    found = ctx.function(cap(full, ctx.softcap), tokens)
                (change,) = torch.autograd.grad(found, full, gradient[tokens])
                logits[rows].copy_(change[:, first : first + len(weight)])

        return *head_gradients(hidden, weight, kept, overwrite, ctx.needs_input_grad), None, None, None, None


def _full(logits, vocabulary):
    """Returns a copy of logits in at least float32: those of the full vocabulary."""
    logits = logits if vocabulary is None else vocabulary.gather(logits)
    return logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)


def _function_chunks(logits, size):
    held = CHUNK_ELEMENTS.get(logits.device.type, FUNCTION_ELEMENTS)
    return slices(len(logits), held // size)


def _within(block, rows):
    """Returns the slice `rows` of the tokens `block` as a slice of all tokens."""
    return slice(block.start + rows.start, min(block.start + rows.stop, block.stop))

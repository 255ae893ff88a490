"""Which token may look at which where several documents share a row, in the forms that attention's kernels want.

`segments` `[batch, seq]` numbers each token's document. A document is a run of one number: the same number again,
further on, is another document.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # the tile of flex attention's kernels


def run_starts(segments: torch.Tensor) -> torch.Tensor:
    """Where in its row each token's document begins, int64 `[batch, seq]`: it sees the keys from there to itself."""
    places = torch.arange(segments.shape[1], device=segments.device)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return torch.where(begins, places, 0).cummax(dim=1).values


def segment_mask(segments: torch.Tensor) -> torch.Tensor:
    """Which keys each query may see: its document's, up to itself. The plain reference of all forms here.

    Args:
        segments: `[batch, seq]`, a number for each token's document.

    Returns:
        bool `[batch, 1, seq, seq]`, true where a query (third axis) sees a key (fourth).
    """
    keys = torch.arange(segments.shape[1], device=segments.device)
    queries = keys.unsqueeze(1)  # [seq, 1]
    return ((keys <= queries) & (keys >= run_starts(segments).unsqueeze(2))).unsqueeze(1)


def block_mask(segments: torch.Tensor) -> BlockMask:
    """`segment_mask` as flex attention's table of blocks (Dong et al., 2024), which skips what no query sees.

    Made from the documents' starts: `create_block_mask` would first fill the whole `[batch, seq, seq]`.
    """
    from torch.nn.attention.flex_attention import BlockMask

    seq = segments.shape[1]
    starts = run_starts(segments)
    blocks = torch.arange(-(-seq // BLOCK), device=segments.device)
    # Starts never fall along a row: a block's first query sees the furthest back, its last query the least far.
    furthest = (starts[:, ::BLOCK] // BLOCK).unsqueeze(2)  # [batch, blocks, 1]
    last = starts[:, ((blocks + 1) * BLOCK - 1).clamp(max=seq - 1)]
    all_see = ((last + BLOCK - 1) // BLOCK).unsqueeze(2)  # from this block on, all of its queries see all keys
    queries = blocks.unsqueeze(1)  # [blocks, 1], against keys' [blocks]
    full = (blocks < queries) & (blocks >= all_see)  # [batch, blocks, blocks]
    full &= (queries + 1) * BLOCK <= seq  # as PyTorch has it, a last block that is not filled sees nothing in full
    partial = (blocks <= queries) & (blocks >= furthest) & ~full

    def visible(batch, head, query, key):
        return (key <= query) & (key >= starts[batch, query])

    return BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(seq, seq)
    )


def _listed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many key blocks each query block has, int32 `[batch, 1, blocks]`, and which, these first."""
    order = chosen.int().argsort(dim=2, descending=True, stable=True)
    return chosen.sum(2, dtype=torch.int32).unsqueeze(1), order.int().unsqueeze(1)


def spans(segments: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Every document as (row, first token, the token after its last)."""
    for row, numbers in enumerate(segments.numpy()):
        edges = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
        for start, stop in pairwise(edges):
            yield row, start, stop


# --- One document after the other, on a CPU: no kernel there skips what a mask hides. ---
# An operator of its own, so that compiled code holds a call and no loop over lengths that change with every batch.

_SIGNATURE = "(Tensor q, Tensor k, Tensor v, Tensor segments, float? scale) -> (Tensor, Tensor)"
_BACKWARD = (
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor segments, float? scale)"
    " -> (Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("weft::each_document", mutates_args=(), device_types="cpu", schema=_SIGNATURE)
def each_document(q, k, v, segments, scale):
    """Causal attention within each document by PyTorch's flash kernel for CPUs.

    Args:
        q, k, v: `[batch, heads, seq, head_dim]`, of one shape.
        segments: int64 `[batch, seq]`.
        scale: None: `1 / sqrt(head_dim)`.

    Returns:
        `[batch, heads, seq, head_dim]`, and the logarithms of the softmax's sums `[batch, heads, seq]`, for backward.
    """
    out, sums = _empty(q), _empty_sums(q)
    for row, start, stop in spans(segments):
        part = slice(row, row + 1), slice(None), slice(start, stop)
        out[part], sums[part] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[part], k[part], v[part], 0.0, True, attn_mask=None, scale=scale
        )
    return out, sums


@torch.library.custom_op("weft::each_document_backward", mutates_args=(), device_types="cpu", schema=_BACKWARD)
def each_document_backward(grad, q, k, v, out, sums, segments, scale):
    """The gradients of q, k and v, each `[batch, heads, seq, head_dim]`."""
    grad = grad.contiguous()  # the kernel takes its last stride for 1
    grads = _empty(q), _empty(q), _empty(q)
    for row, start, stop in spans(segments):
        part = slice(row, row + 1), slice(None), slice(start, stop)
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad[part], q[part], k[part], v[part], out[part], sums[part], 0.0, True, attn_mask=None, scale=scale
        )
        for whole, piece in zip(grads, parts, strict=True):
            whole[part] = piece
    return grads


def _empty(q: torch.Tensor) -> torch.Tensor:
    batch, heads, seq, head_dim = q.shape
    return q.new_empty(batch, seq, heads, head_dim).transpose(1, 2)  # the caller merges heads next: then it is a view


def _empty_sums(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@each_document.register_fake
def _(q, k, v, segments, scale):
    return _empty(q), _empty_sums(q)


@each_document_backward.register_fake
def _(grad, q, k, v, out, sums, segments, scale):
    return _empty(q), _empty(q), _empty(q)


def _keep(ctx, inputs, output):
    q, k, v, segments, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, segments)


def _backward(ctx, grad, _):
    q, k, v, out, sums, segments = ctx.saved_tensors
    return *each_document_backward(grad, q, k, v, out, sums, segments, ctx.scale), None, None


each_document.register_autograd(_backward, setup_context=_keep)

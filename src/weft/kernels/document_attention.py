"""Which token may look at which where several documents share a row, in the forms that attention's kernels want.

`segments` `[batch, seq]` numbers each token's document. A document is a run of one number: the same number again,
further on, is another document.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from weft.torch_private import flash_cpu, flash_cpu_backward

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # the tile of flex attention's kernels


def run_starts(segments: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """The first key that each token sees, int64 `[batch, seq]`: it sees the keys from there to itself.

    That is where its document begins or, with a sliding window, the first of the last `window` tokens if that is later.
    """
    places = torch.arange(segments.shape[1], device=segments.device)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = torch.where(begins, places, 0).cummax(dim=1).values
    return starts if window is None else torch.maximum(starts, places - window + 1)


def segment_mask(
    segments: torch.Tensor,
    window: int | None = None,
    queries: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which keys each query may see: its document's, up to itself. The plain reference of all forms here.

    Args:
        segments: `[batch, seq]`, a number for each token's document.
        window: the most keys that a query sees, its own with them.
        queries, keys: places of those that the mask is for; default: all, in order.

    Returns:
        bool `[batch, 1, queries, keys]`, true where a query (third axis) sees a key (fourth).
    """
    places = torch.arange(segments.shape[1], device=segments.device)
    queries, keys = places if queries is None else queries, places if keys is None else keys
    starts = run_starts(segments, window)[:, queries].unsqueeze(2)
    return ((keys <= queries.unsqueeze(1)) & (keys >= starts)).unsqueeze(1)


def block_mask(segments: torch.Tensor, window: int | None = None) -> BlockMask:
    """`segment_mask` as flex attention's table of blocks (Dong et al., 2024), which skips what no query sees.

    Made from the documents' starts: `create_block_mask` would first fill the whole `[batch, seq, seq]`.
    """
    from torch.nn.attention.flex_attention import BlockMask

    seq = segments.shape[1]
    starts = run_starts(segments, window)
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


# --- On a CPU, where no kernel skips what a mask hides: long documents one by one, short ones side by side. ---
# An operator of its own, so that compiled code holds one call, and nothing of lengths that change with every batch.

# Up to so many tokens, calls for single documents cost more than copying them together; and that in float32, for each
# of bfloat16's small matrix products has its price: 4,096 tokens in documents of 16 took 176 ms, in float32 42; in
# documents of 128 they took 120 and 77, of 256 80 and 96, of 2,048 235 and 322 (8 heads of 64, one thread, with AMX).
SHORT = 180

_SIGNATURE = "(Tensor q, Tensor k, Tensor v, Tensor segments, float? scale) -> (Tensor, Tensor)"
_BACKWARD = (
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, Tensor segments, float? scale)"
    " -> (Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("weft::document_attention", mutates_args=(), device_types="cpu", schema=_SIGNATURE)
def document_attention(q, k, v, segments, scale):
    """Causal attention within each document, by PyTorch's flash kernel for CPUs.

    Args:
        q, k, v: `[batch, heads, seq, head_dim]`, of one shape.
        segments: int64 `[batch, seq]`.
        scale: None: `1 / sqrt(head_dim)`.

    Returns:
        `[batch, heads, seq, head_dim]`, and the logarithms of the softmax's sums `[batch, heads, seq]`, for backward.
    """
    (out, out_rows), (sums, sums_rows) = _new(q), _new_sums(q)
    settings = {"dropout_p": 0.0, "is_causal": True, "scale": scale}
    starts, lengths = _documents(segments)
    for part in _long(starts, lengths, segments.shape[1]):
        out[part], sums[part] = flash_cpu(q[part], k[part], v[part], **settings)
    rows = [_rows(x) for x in (q, k, v)]
    for places, targets, _ in _short(starts, lengths):
        parts = (x[places].to(sums.dtype).transpose(1, 2) for x in rows)  # [documents, heads, longest, head_dim]
        part_out, part_sums = flash_cpu(*parts, **settings)
        out_rows[targets] = part_out.transpose(1, 2).to(q.dtype)
        sums_rows[targets] = part_sums.transpose(1, 2)
    return out, sums


@torch.library.custom_op("weft::document_attention_backward", mutates_args=(), device_types="cpu", schema=_BACKWARD)
def document_attention_backward(grad, q, k, v, out, sums, segments, scale):
    """The gradients of q, k and v, each `[batch, heads, seq, head_dim]`."""
    new = [_new(q) for _ in range(3)]
    settings = {"dropout_p": 0.0, "is_causal": True, "scale": scale}
    starts, lengths = _documents(segments)
    wholes = [x.contiguous() if x is grad else x for x in (grad, q, k, v, out, sums)]  # the last stride must be 1
    for part in _long(starts, lengths, segments.shape[1]):
        for (whole, _), one in zip(new, flash_cpu_backward(*(x[part] for x in wholes), **settings), strict=True):
            whole[part] = one
    rows = [_rows(x) for x in (grad, q, k, v, out, sums)]
    for places, targets, padding in _short(starts, lengths):
        parts = [x[places].to(sums.dtype) for x in rows]
        parts[0][padding] = 0  # so padding gives nothing to the tokens before it
        for (_, whole), one in zip(
            new, flash_cpu_backward(*(x.transpose(1, 2) for x in parts), **settings), strict=True
        ):
            whole[targets] = one.transpose(1, 2).to(q.dtype)
    return tuple(whole for whole, _ in new)


def _documents(segments: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """First tokens, numbered through all rows, and lengths of all documents."""
    numbers = segments.numpy()
    begins = np.ones(numbers.shape, bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    starts = np.flatnonzero(begins)
    return starts, np.diff(starts, append=numbers.size)


def _long(starts: np.ndarray, lengths: np.ndarray, seq: int) -> Iterator[tuple[slice, slice, slice]]:
    """Each long document's place in `[batch, heads, seq]`."""
    chosen = lengths > SHORT
    for start, length in zip(starts[chosen].tolist(), lengths[chosen].tolist(), strict=True):
        row, first = divmod(start, seq)
        yield slice(row, row + 1), slice(None), slice(first, first + length)


def _short(starts: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Short documents of like lengths, as tables of tokens `[documents, longest]`.

    A shorter one is filled up with its last token: what comes after a token changes nothing for it.

    Yields:
        Where to read; where to write, which for padding is behind all tokens; and what is padding.
    """
    tokens = int(lengths.sum())
    classes = np.where(lengths <= SHORT, np.ceil(2 * np.log2(lengths)), -1)  # two for each doubling: little padding
    for one in np.unique(classes[classes >= 0]):
        chosen = np.flatnonzero(classes == one)
        own = lengths[chosen, None]
        counted = np.arange(own.max())
        places = torch.from_numpy(starts[chosen, None] + np.minimum(counted, own - 1))
        padding = torch.from_numpy(counted >= own)
        yield places, places.masked_fill(padding, tokens), padding


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[batch, heads, seq, ...]` as `[batch x seq, heads, ...]`."""
    return x.transpose(1, 2).flatten(0, 1)


def _new(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for a result shaped as `q`, and the same as rows `[batch x seq + 1, heads, head_dim]`, one for padding."""
    batch, heads, seq, head_dim = q.shape
    rows = q.new_empty(batch * seq + 1, heads, head_dim)
    return rows[:-1].view(batch, seq, heads, head_dim).transpose(1, 2), rows


def _new_sums(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, seq, _ = q.shape
    rows = q.new_empty(batch * seq + 1, heads, dtype=torch.promote_types(q.dtype, torch.float32))
    return rows[:-1].view(batch, seq, heads).transpose(1, 2), rows


@document_attention.register_fake
def _(q, k, v, segments, scale):
    return _new(q)[0], _new_sums(q)[0]


@document_attention_backward.register_fake
def _(grad, q, k, v, out, sums, segments, scale):
    return _new(q)[0], _new(q)[0], _new(q)[0]


def _keep(ctx, inputs, output):
    q, k, v, segments, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, segments)


def _backward(ctx, grad, _):
    q, k, v, out, sums, segments = ctx.saved_tensors
    return *document_attention_backward(grad, q, k, v, out, sums, segments, ctx.scale), None, None


document_attention.register_autograd(_backward, setup_context=_keep)

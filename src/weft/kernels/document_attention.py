"""Attention within documents packed into one sequence: masks, and a CPU kernel.

`segments` `[batch, seq]` contains the index of each token's document. A document is a run of tokens with the same
index. If an index occurs again after other indices, it stands for another document.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weft.torch_private import flash_cpu, flash_cpu_backward

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # the tile of flex attention's kernels


def run_starts(segments: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Returns the index of the first key that each token sees, int64 `[batch, seq]`.

    A token sees the keys from this index to its own. The first key is the start of the token's document, or the start
    of the token's sliding window if the window starts later.
    """
    positions = torch.arange(segments.shape[1], device=segments.device)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = torch.where(begins, positions, 0).cummax(dim=1).values
    return starts if window is None else torch.maximum(starts, positions - window + 1)


def segment_mask(
    segments: torch.Tensor,
    window: int | None = None,
    queries: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the causal mask within documents, bool `[batch, 1, queries, keys]`, true where a query sees a key.

    Args:
        segments: `[batch, seq]`, index of each token's document.
        window: sliding window size, counting the query itself.
        queries, keys: indices in the sequence of the query tokens and of the key tokens; None: all tokens, in order.
    """
    positions = torch.arange(segments.shape[1], device=segments.device)
    queries, keys = positions if queries is None else queries, positions if keys is None else keys
    starts = run_starts(segments, window)[:, queries].unsqueeze(2)
    return ((keys <= queries.unsqueeze(1)) & (keys >= starts)).unsqueeze(1)


def block_mask(segments: torch.Tensor, window: int | None = None) -> BlockMask:
    """Returns the mask of `segment_mask` as flex attention's `BlockMask` (Dong et al., 2024).

    The `BlockMask` is built from the starts of documents, because PyTorch's `create_block_mask` would first materialize
    `[batch, seq, seq]`.
    """
    from torch.nn.attention.flex_attention import BlockMask

    seq = segments.shape[1]
    starts = run_starts(segments, window)
    blocks = torch.arange(-(-seq // BLOCK), device=segments.device)
    # Starts never decrease along a sequence: of a block's queries, the first sees furthest back, the last least far.
    first_seen = (starts[:, ::BLOCK] // BLOCK).unsqueeze(2)  # [batch, blocks, 1]
    last = starts[:, ((blocks + 1) * BLOCK - 1).clamp(max=seq - 1)]
    first_full = ((last + BLOCK - 1) // BLOCK).unsqueeze(2)  # the first key block that all queries see in full
    queries = blocks.unsqueeze(1)  # [blocks, 1], against keys' [blocks]
    full = (blocks < queries) & (blocks >= first_full)  # [batch, blocks, blocks]
    full &= (queries + 1) * BLOCK <= seq  # as in PyTorch, an incomplete last query block has no full key blocks
    partial = (blocks <= queries) & (blocks >= first_seen) & ~full

    def visible(batch, head, query, key):
        return (key <= query) & (key >= starts[batch, query])

    return BlockMask.from_kv_blocks(
        *_block_lists(partial), *_block_lists(full), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(seq, seq)
    )


def _block_lists(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts a mask of blocks to the lists of key blocks that a `BlockMask` consists of.

    Args:
        chosen: bool `[batch, query blocks, key blocks]`.

    Returns:
        The number of chosen key blocks of each query block, `[batch, 1, query blocks]`; and the indices of all key
        blocks for each query block, chosen blocks first, `[batch, 1, query blocks, key blocks]`.
    """
    order = chosen.int().argsort(dim=2, descending=True, stable=True)
    return chosen.sum(2, dtype=torch.int32).unsqueeze(1), order.int().unsqueeze(1)


# --- CPU kernel, where `blocked_attention` is not faster. PyTorch's kernels skip no masked blocks, so long documents
# are computed one by one, and short documents in batches. It is a custom operator: compiled code sees one call and no
# document lengths, which change with every batch.

# Up to this length, copying documents into a batch is cheaper than one call per document. The batch is in float32,
# because the kernel's small bfloat16 matrix products are slow. Times for 4,096 tokens in bfloat16 and in float32 (8
# heads of 64, one thread, AMX): documents of 16 tokens 176 and 42 ms, of 128 tokens 120 and 77 ms, of 256 tokens 80 and
# 96 ms, of 2,048 tokens 235 and 322 ms.
SHORT = 180

_SIGNATURE = "(Tensor q, Tensor k, Tensor v, Tensor segments, float? scale) -> (Tensor, Tensor)"
_BACKWARD = (
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor segments, float? scale)"
    " -> (Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("weft::document_attention", mutates_args=(), device_types="cpu", schema=_SIGNATURE)
def document_attention(q, k, v, segments, scale):
    """Computes causal attention within each document on CPUs, by PyTorch's flash kernel.

    Args:
        q, k, v: `[batch, heads, seq, head_dim]`; all three have the same shape.
        segments: int64 `[batch, seq]`, index of each token's document.
        scale: multiplier of the scores; None: `1 / sqrt(head_dim)`.

    Returns:
        The output `[batch, heads, seq, head_dim]`; and, for the backward pass, the log-sum-exp of the scores `[batch,
        heads, seq]`.
    """
    (out, out_tokens), (lse, lse_tokens) = _empty(q), _empty_lse(q)
    settings = _settings(scale)
    starts, lengths = _documents(segments)
    for document in _long_documents(starts, lengths, segments.shape[1]):
        out[document], lse[document] = flash_cpu(q[document], k[document], v[document], **settings)
    flat = [_flatten_tokens(x) for x in (q, k, v)]
    for sources, targets, _ in _short_documents(starts, lengths):
        padded = (x[sources].to(lse.dtype).transpose(1, 2) for x in flat)  # [documents, heads, longest, head_dim]
        batch_out, batch_lse = flash_cpu(*padded, **settings)
        out_tokens[targets], lse_tokens[targets] = batch_out.transpose(1, 2).to(q.dtype), batch_lse.transpose(1, 2)
    return out, lse


@torch.library.custom_op("weft::document_attention_backward", mutates_args=(), device_types="cpu", schema=_BACKWARD)
def document_attention_backward(grad, q, k, v, out, lse, segments, scale):
    """Returns the gradients of q, k and v, each `[batch, heads, seq, head_dim]`.

    Args:
        grad: gradient of `out`.
        q, k, v, segments, scale: the arguments of `document_attention`.
        out, lse: the results of `document_attention`.
    """
    new = [_empty(q) for _ in range(3)]
    starts, lengths = _documents(segments)
    saved, settings = (q, k, v, out, lse), _settings(scale)
    inputs = (grad.contiguous(), *saved)  # the kernel needs a last stride of 1
    for document in _long_documents(starts, lengths, segments.shape[1]):
        gradients = flash_cpu_backward(*(x[document] for x in inputs), **settings)
        for (result, _), gradient in zip(new, gradients, strict=True):
            result[document] = gradient
    flat = [_flatten_tokens(x) for x in (grad, *saved)]
    for sources, targets, padding in _short_documents(starts, lengths):
        padded = [x[sources].to(lse.dtype) for x in flat]
        padded[0][padding] = 0  # no gradient from padding
        gradients = flash_cpu_backward(*(x.transpose(1, 2) for x in padded), **settings)
        for (_, tokens), gradient in zip(new, gradients, strict=True):
            tokens[targets] = gradient.transpose(1, 2).to(q.dtype)
    return tuple(result for result, _ in new)


def _settings(scale: float | None) -> dict[str, Any]:
    return {"dropout_p": 0.0, "is_causal": True, "scale": scale}


def _documents(segments: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Returns the index of each document's first token in the flattened batch, and the documents' lengths."""
    numbers = segments.numpy()
    begins = np.ones(numbers.shape, bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    starts = np.flatnonzero(begins)
    return starts, np.diff(starts, append=numbers.size)


def _long_documents(starts: np.ndarray, lengths: np.ndarray, seq: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yields, for each document longer than SHORT, the slices of `[batch, heads, seq]` that contain the document."""
    chosen = lengths > SHORT
    for start, length in zip(starts[chosen].tolist(), lengths[chosen].tolist(), strict=True):
        sequence, first = divmod(start, seq)
        yield slice(sequence, sequence + 1), slice(None), slice(first, first + length)


def _short_documents(
    starts: np.ndarray, lengths: np.ndarray
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yields groups of documents with similar lengths, at most SHORT tokens each.

    Within a group, shorter documents are right-padded with copies of their last token. Padding does not affect the
    tokens before it, because attention is causal.

    Yields:
        For each group, three tensors `[documents, longest]`: indices of the tokens to read, in the flattened batch;
        indices to write the results to, which are batch x seq for padding (the extra row of `_empty`); and a bool mask
        that is true for padding.
    """
    tokens = int(lengths.sum())
    classes = np.where(lengths <= SHORT, np.ceil(2 * np.log2(lengths)), -1)  # two per doubling, for little padding
    for length_class in np.unique(classes[classes >= 0]):
        chosen = np.flatnonzero(classes == length_class)
        length = lengths[chosen, None]
        offsets = np.arange(length.max())
        sources = torch.from_numpy(starts[chosen, None] + np.minimum(offsets, length - 1))
        padding = torch.from_numpy(offsets >= length)
        yield sources, sources.masked_fill(padding, tokens), padding


def _flatten_tokens(x: torch.Tensor) -> torch.Tensor:
    """Flattens batch and sequence: `[batch, heads, seq, ...]` -> `[batch x seq, heads, ...]`."""
    return x.transpose(1, 2).flatten(0, 1)


def _empty(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns an uninitialized tensor shaped like `q`, and a tensor `[batch x seq + 1, heads, head_dim]`.

    The first tensor is a view of all rows of the second except the last, which takes the results for padding.
    """
    batch, heads, seq, head_dim = q.shape
    tokens = q.new_empty(batch * seq + 1, heads, head_dim)
    return tokens[:-1].view(batch, seq, heads, head_dim).transpose(1, 2), tokens


def _empty_lse(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, seq, _ = q.shape
    tokens = q.new_empty(batch * seq + 1, heads, dtype=torch.promote_types(q.dtype, torch.float32))
    return tokens[:-1].view(batch, seq, heads).transpose(1, 2), tokens


@document_attention.register_fake
def _(q, k, v, segments, scale):
    return _empty(q)[0], _empty_lse(q)[0]


@document_attention_backward.register_fake
def _(grad, q, k, v, out, lse, segments, scale):
    return _empty(q)[0], _empty(q)[0], _empty(q)[0]


def _setup_context(ctx, inputs, output):
    q, k, v, segments, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, segments)


def _backward(ctx, grad, _):
    q, k, v, out, lse, segments = ctx.saved_tensors
    return *document_attention_backward(grad, q, k, v, out, lse, segments, ctx.scale), None, None


document_attention.register_autograd(_backward, setup_context=_setup_context)

"""Attention masks in the form that each kernel needs, built once per forward pass for all layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch

from weft.kernels.blocked_attention import LONG, Window, usable
from weft.kernels.document_attention import block_mask, run_starts, segment_mask
from weft.kernels.flash import FlashMask, flash_usable

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

FLEX_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # dtypes that Triton's matrix products support

Pattern = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (query, key) -> bool, see weft/kernels/patterns


def attention_mask(
    tokens: torch.Tensor,
    segments: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    head_dim: int,
    dropout: float = 0.0,
    sparse: int | Pattern | None = None,
    softcap: bool = False,
    sinks: bool = False,
    slopes: torch.Tensor | None = None,
    implementation: str = "auto",
) -> torch.Tensor | BlockMask | FlashMask | Window | None:
    """Returns the `mask` argument of `attention`: causal, within documents, with a sliding window or sparse pattern.

    The form of the mask selects the kernel:

    - A `BlockMask` selects flex attention, on CUDA devices.
    - The tensor `segments` itself selects `document_attention`, on CPUs, or `blocked_attention` where that is faster.
    - A `Window` selects `blocked_attention`, on CPUs: for soft caps and sinks, and for sliding windows and ALiBi in
      long sequences; in short ones on processors on which it is faster.
    - A float mask, which contains ALiBi's biases, selects PyTorch's fused kernel on CPUs. This kernel takes a third of
      the time of unfused attention.
    - None stands for a purely causal mask, which is fastest with PyTorch's fused kernels.
    - A boolean mask is the form for all other cases, such as attention dropout, float64 on a GPU, or other devices.

    Args:
        tokens: `[batch, seq]`; only the shape and the device are used.
        segments: int64 `[batch, seq]`, index of each token's document; a document is a run of tokens with the same
            index. None: each sequence is one document.
        dtype: dtype of the queries.
        head_dim: size of a query head.
        dropout: probability of dropping an attention weight.
        sparse: sliding window size, counting the query itself (Beltagy et al., 2020), or a sparse pattern.
        softcap, sinks: whether `attention` is called with these scores.
        slopes: ALiBi's slopes `[heads]`, or None.
        implementation: value of `model.attention_implementation`. "sdpa" excludes flex attention; "flex" selects it
            wherever it can run; "flash" selects flash-attn. For a custom implementation, the result is
            a bool mask or None, and `slopes` is ignored.

    Raises:
        UserError: `implementation` is flash, gradients are enabled, and flash-attn cannot run.
    """
    kind, seq, plain = tokens.device.type, tokens.shape[1], not (softcap or sinks)
    pattern = sparse if callable(sparse) else None
    window = sparse if isinstance(sparse, int) and sparse < seq else None
    if implementation == "flash" and flash_usable(tokens.device, dtype):
        return FlashMask.of(segments, window)
    flex = implementation in ("auto", "flex", "flash") and flex_usable(tokens.device, dtype, head_dim, dropout)
    built_in = ":" not in implementation
    alibi = built_in and plain and kind == "cpu" and slopes is not None
    purely_causal = segments is None and window is None and pattern is None and not alibi
    if purely_causal and not (flex and implementation == "flex"):
        return None
    if pattern is not None and flex:
        if segments is None:
            return pattern_block_mask(pattern, seq, tokens.device)
        return sparse_block_mask(segments, None, pattern)
    one_mask = segments is None  # the same for all sequences of the batch
    cpu_kernel = kind == "cpu" and dropout == 0 and built_in and pattern is None
    masked = window is not None or slopes is not None
    few = not plain or (masked and seq >= LONG)
    if cpu_kernel and (masked or not plain) and usable(tokens.device, dtype, plain=not few):
        return Window(window or seq, None if segments is None else run_starts(segments, window))
    segments = torch.zeros_like(tokens) if segments is None else segments
    if alibi and slopes is not None:
        seen = segment_mask(segments[:1] if one_mask else segments, window)
        seen = seen if pattern is None else pattern_mask(pattern, segments)
        return alibi_mask(seen, slopes, dtype)
    if pattern is not None:
        return pattern_mask(pattern, segments)
    if flex:
        return block_mask(segments, window)
    if cpu_kernel and plain and window is None and slopes is None:
        return segments
    return segment_mask(segments, window)


def flex_usable(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float = 0.0) -> bool:
    """Whether flex attention can run. It supports neither dropout nor, on CPUs, a backward pass."""
    return device.type == "cuda" and dropout == 0 and dtype in FLEX_DTYPES and head_dim >= 16


def alibi_mask(
    seen: torch.Tensor,
    slopes: torch.Tensor,
    dtype: torch.dtype,
    queries: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns a float mask to add to the scores: ALiBi's biases (Press et al., 2022), -inf for hidden keys.

    Args:
        seen: bool `[batch or 1, 1, queries, keys]`, true where a query sees a key.
        slopes: ALiBi's slopes `[heads]`.
        dtype: dtype of the queries; the mask is at least float32.
        queries, keys: indices of tokens in the sequence; None: all tokens, in order.

    Returns:
        `[batch or 1, heads, queries, keys]`.
    """
    positions = torch.arange(seen.shape[3], device=seen.device)
    queries, keys = positions if queries is None else queries, positions if keys is None else keys
    distances = (queries.unsqueeze(1) - keys).to(torch.promote_types(dtype, torch.float32))
    biases = -slopes.to(distances.dtype).view(-1, 1, 1) * distances
    return biases.masked_fill(~seen, float("-inf"))


def pattern_mask(
    pattern: Pattern,
    segments: torch.Tensor,
    queries: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the mask of a sparse pattern within each document, bool `[batch, 1, queries, keys]`.

    `segments`, `queries` and `keys` are as in `segment_mask`.
    """
    positions = torch.arange(segments.shape[1], device=segments.device)
    queries, keys = positions if queries is None else queries, positions if keys is None else keys
    positions = positions - run_starts(segments)  # [batch, seq], within each token's document
    chosen = pattern(positions[:, queries].unsqueeze(2), positions[:, keys].unsqueeze(1)).unsqueeze(1)
    return segment_mask(segments, None, queries, keys) & chosen | (queries.unsqueeze(1) == keys)


@lru_cache(maxsize=8)
def pattern_block_mask(pattern: Pattern, seq: int, device: torch.device) -> BlockMask:
    """Returns the causal mask of a sparse pattern as a `BlockMask`. Each sequence is one document."""

    def visible(batch, head, query, key):
        return (key <= query) & (pattern(query, key) | (key == query))

    return _create_block_mask(visible, None, (seq, seq), device)


def sparse_block_mask(
    segments: torch.Tensor,
    window: int | None,
    pattern: Pattern | None,
    queries: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
) -> BlockMask:
    """Returns the mask of `segment_mask` or, if `pattern` is not None, of `pattern_mask` as a `BlockMask`.

    The arguments are as in these two functions. The indices in `keys` can be in any order.
    """
    starts, document_starts = run_starts(segments, window), run_starts(segments)

    def visible(batch, head, query, key):
        query, key = query if queries is None else queries[query], key if keys is None else keys[key]
        seen = (key <= query) & (key >= starts[batch, query])
        if pattern is not None:
            start = document_starts[batch, query]
            seen = seen & pattern(query - start, key - start) | (key == query)
        return seen

    seq = segments.shape[1]
    sizes = (seq if queries is None else len(queries), seq if keys is None else len(keys))
    return _create_block_mask(visible, len(segments), sizes, segments.device)


def _create_block_mask(visible: Callable, batch: int | None, sizes: tuple[int, int], device: torch.device) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask

    # Compiled, it never materializes `[batch, seq, seq]`. Only tests run this on CPUs, where compiling takes longer.
    create = _compiled_create_block_mask() if device.type == "cuda" else create_block_mask
    return create(visible, batch, None, *sizes, device=device)


@cache
def _compiled_create_block_mask() -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask)

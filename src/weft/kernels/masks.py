"""Who sees whom, in the form that the attention kernel wants: made once a forward, for all layers alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch

from weft.kernels.document_attention import block_mask, run_starts, segment_mask
from weft.kernels.flash import FlashMask, flash_usable

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

FLEX_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # those that Triton's matrix products know

Pattern = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (query, key) -> bool, see weft/kernels/patterns


def attention_mask(
    tokens: torch.Tensor,
    segments: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    head_dim: int,
    dropout: float = 0.0,
    sparse: int | Pattern | None = None,
    plain: bool = True,
    slopes: torch.Tensor | None = None,
    implementation: str = "auto",
) -> torch.Tensor | BlockMask | FlashMask | None:
    """For `attention`'s `mask`: causality, documents, and a sliding window (Beltagy et al., 2020) or a sparse pattern.

    On a GPU it is a table of blocks for flex attention; on a CPU the segments themselves, whose documents are attended
    to one by one; else (dropout of weights, float64 on a GPU, other devices) a boolean mask. Where causality says all,
    it is None, and PyTorch's fused kernels do best. Penalties on distance are added to a CPU's mask, which then is not
    boolean: its fused kernel takes them so, in a third of the time that all scores one by one take.

    Args:
        tokens: `[batch, seq]`; only their shape and device count.
        segments: int64 `[batch, seq]`, a number for each token's document; a document is a run of one number. None:
            each row is one.
        dtype, head_dim: of the queries.
        dropout: as `attention`'s.
        sparse: the most keys that a query sees, its own with them; or which it looks at, by places in the document.
        plain: `attention` is called without `softcap` and `sinks`.
        slopes: as `Scores`'.
        implementation: auto; sdpa (no flex attention); flex (where it is usable); flash; any other: boolean masks.

    Raises:
        UserError: flash, in training, where its kernels cannot be called.
    """
    kind, seq = tokens.device.type, tokens.shape[1]
    pattern = sparse if callable(sparse) else None
    window = sparse if isinstance(sparse, int) and sparse < seq else None
    if implementation == "flash" and flash_usable(tokens.device, dtype):
        return FlashMask.of(segments, window)
    flex = implementation in ("auto", "flex", "flash") and flex_usable(tokens.device, dtype, head_dim, dropout)
    penalties = slopes if plain and kind == "cpu" else None
    causal_alone = segments is None and window is None and pattern is None and penalties is None
    if causal_alone and not (flex and implementation == "flex"):
        return None
    if pattern is not None and flex:
        return (
            pattern_block_mask(pattern, seq, tokens.device)
            if segments is None
            else document_pattern_block_mask(pattern, segments)
        )
    alike = segments is None
    segments = torch.zeros_like(tokens) if segments is None else segments
    if penalties is not None:
        seen = segment_mask(segments[:1] if alike else segments, window)
        seen = seen if pattern is None else pattern_mask(pattern, segments)
        return alibi_mask(seen, penalties, dtype)
    if pattern is not None:
        return pattern_mask(pattern, segments)
    if flex:
        return block_mask(segments, window)
    known = implementation in ("auto", "sdpa", "flex", "flash")
    if kind == "cpu" and dropout == 0 and window is None and plain and slopes is None and known:
        return segments
    return segment_mask(segments, window)


def flex_usable(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float = 0.0) -> bool:
    """Whether flex attention can be called: it has no backward on CPUs, and drops no weights."""
    return device.type == "cuda" and dropout == 0 and dtype in FLEX_DTYPES and head_dim >= 16


def alibi_mask(
    seen: torch.Tensor,
    slopes: torch.Tensor,
    dtype: torch.dtype,
    queries: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """What is added to scores: ALiBi's penalties (Press et al., 2022), and minus infinity for keys that are not seen.

    Args:
        seen: bool `[batch or 1, 1, seq, seq]`.
        slopes: `[heads]`.
        dtype: of the queries.
        queries, keys: as `segment_mask`'s.

    Returns:
        `[batch or 1, heads, queries, keys]`, at least float32.
    """
    places = torch.arange(seen.shape[3], device=seen.device)
    queries, keys = places if queries is None else queries, places if keys is None else keys
    distances = (queries.unsqueeze(1) - keys).to(torch.promote_types(dtype, torch.float32))
    penalties = -slopes.to(distances.dtype).view(-1, 1, 1) * distances
    return penalties.masked_fill(~seen, float("-inf"))


def pattern_mask(
    pattern: Pattern,
    segments: torch.Tensor,
    queries: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """A sparse pattern within each document, as bool `[batch, 1, queries, keys]`: the reference of the forms below.

    Args:
        queries, keys: as `segment_mask`'s.
    """
    places = torch.arange(segments.shape[1], device=segments.device)
    queries, keys = places if queries is None else queries, places if keys is None else keys
    places = places - run_starts(segments)  # [batch, seq], in each token's document
    looks = pattern(places[:, queries].unsqueeze(2), places[:, keys].unsqueeze(1)).unsqueeze(1)
    return segment_mask(segments, None, queries, keys) & looks | (queries.unsqueeze(1) == keys)


def cached_pattern_mask(
    pattern: Pattern, positions: torch.Tensor, keys: int, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """A sparse pattern's last rows, for queries beside a cache: bool `[batch or 1, 1, seq, keys]`.

    Args:
        positions: `[batch or 1, seq]`, the queries' places in their documents, one after another.
        keys: how many there are, the queries' own the last of them.
        mask: which of them the queries may see; None: all up to their own.
    """
    columns = torch.arange(keys, device=positions.device)
    queries = columns[keys - positions.shape[1] :].unsqueeze(1)  # [seq, 1]
    places = positions[:, -1:] - (keys - 1 - columns)  # [batch or 1, keys], negative for padding
    looks = pattern(positions.unsqueeze(2), places.unsqueeze(1)).unsqueeze(1)
    seen = columns <= queries if mask is None else mask
    return seen & looks | (columns == queries)  # a row of padding without any key would be NaN


@lru_cache(maxsize=8)
def pattern_block_mask(pattern: Pattern, seq: int, device: torch.device) -> BlockMask:
    """A sparse pattern as flex attention's table of blocks (Dong et al., 2024), where each row is one document."""

    def visible(batch, head, query, key):
        return (key <= query) & (pattern(query, key) | (key == query))

    return _blocks(visible, None, (seq, seq), device)


def document_pattern_block_mask(pattern: Pattern, segments: torch.Tensor) -> BlockMask:
    """`pattern_mask` as flex attention's table of blocks."""
    starts = run_starts(segments)

    def visible(batch, head, query, key):
        start = starts[batch, query]
        looks = pattern(query - start, key - start) | (key == query)
        return (key <= query) & (key >= start) & looks

    seq = segments.shape[1]
    return _blocks(visible, len(segments), (seq, seq), segments.device)


def partial_block_mask(
    segments: torch.Tensor, window: int | None, pattern: Pattern | None, queries: torch.Tensor, keys: torch.Tensor
) -> BlockMask:
    """`segment_mask` or `pattern_mask` of some queries and of keys in any order, as a table of blocks."""
    starts, firsts = run_starts(segments, window), run_starts(segments)

    def visible(batch, head, query, key):
        query, key = queries[query], keys[key]
        seen = (key <= query) & (key >= starts[batch, query])
        if pattern is not None:
            start = firsts[batch, query]
            seen = seen & pattern(query - start, key - start) | (key == query)
        return seen

    return _blocks(visible, len(segments), (len(queries), len(keys)), segments.device)


def _blocks(visible: Callable, batch: int | None, sizes: tuple[int, int], device: torch.device) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask

    # Compiled, the whole `[batch, seq, seq]` is never there. On a CPU it is for tests, and compiling takes longer.
    make = _compiled_making() if device.type == "cuda" else create_block_mask
    return make(visible, batch, None, *sizes, device=device)


@cache
def _compiled_making() -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask)

"""Defines the paged key/value cache of generation (Kwon et al., 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from weft.kernels.masks import Pattern
from weft.models.decoder import Decoder

BLOCK = 16  # tokens per block


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence that a forward pass computes.

    Attributes:
        blocks: indices of the sequence's blocks, in order, at least up to position `end`. -1 can stand for a block that
            no layer needs any more.
        start: position of the first token of the chunk.
        end: position after the last token of the chunk.
    """

    blocks: Sequence[int]
    start: int
    end: int


class _Group(NamedTuple):
    """Chunks of equal length, which attention computes together.

    Attributes:
        chunks: the chunks.
        begin: index of the group's first token in the forward pass.
        end: index after the group's last token in the forward pass.
    """

    chunks: list[Chunk]
    begin: int
    end: int


class _View(NamedTuple):
    """The keys that the queries of a group see, in all layers with the same window size.

    Attributes:
        blocks: `[chunks, blocks]`, indices of the blocks of each sequence, starting with the block of the sequence's
            first visible key; right-padded with the last block.
        first: index of the first visible key in the first block; 0 if the group has several chunks.
        keys: number of keys of each sequence, starting at `first`.
        mask: bool `[chunks, 1, seq, keys]`; None: causal.
    """

    blocks: torch.Tensor
    first: int
    keys: int
    mask: torch.Tensor | None


class PagedCache:
    """The keys and values of many sequences, in blocks of `BLOCK` tokens that sequences can share.

    Each layer has a pool of blocks for keys and one for values, which are allocated at the first write. A forward pass
    computes chunks of several sequences, whose tokens are concatenated into one row. The row can be padded at the end.

    Args:
        windows: sliding window size of each layer, counting the query itself; None for a layer without sliding window.
        pattern: sparse attention pattern of the layers without a sliding window, or None.
        apart: whether attention is computed separately for each sequence.
    """

    def __init__(self, windows: Sequence[int | None], pattern: Pattern | None = None, apart: bool = False):
        self.windows, self.pattern, self.apart = list(windows), pattern, apart
        self.blocks = 0
        self._pools: dict[int, list[torch.Tensor]] = {}
        self._groups: list[_Group] = []
        self._views: dict[tuple[int, int | None, torch.device], _View] = {}
        self._slots = torch.empty(0, dtype=torch.long)

    @property
    def nbytes(self) -> int:
        """The allocated memory in bytes."""
        return sum(pool.nbytes for pools in self._pools.values() for pool in pools)

    def grow(self, blocks: int) -> None:
        """Increases the number of blocks of each pool. The contents of the present blocks are kept."""
        self.blocks = blocks
        for pools in self._pools.values():
            for i, pool in enumerate(pools):
                pools[i] = pool.new_zeros(blocks, *pool.shape[1:])
                pools[i][: len(pool)] = pool

    @torch.inference_mode()
    def zero(self, blocks: Sequence[int]) -> None:
        """Overwrites the contents of blocks with zeros."""
        for pools in self._pools.values():
            for pool in pools:
                pool[list(blocks)] = 0

    def begin(self, chunks: Sequence[Chunk], device: torch.device) -> list[int]:
        """Prepares a forward pass that computes chunks of several sequences.

        Returns:
            The indices of `chunks`, in the order in which the caller must concatenate the tokens of the chunks.
        """
        # Chunks of equal length are computed together if their numbers of keys are similar, which limits padding.
        order = sorted(range(len(chunks)), key=lambda i: (chunks[i].end - chunks[i].start, -chunks[i].end))
        self._groups, self._views, row = [], {}, 0
        for i in order:
            chunk, group = chunks[i], self._groups[-1].chunks if self._groups else []
            length = chunk.end - chunk.start
            same = group and not self.apart and group[0].end - group[0].start == length
            if same and group[0].end <= 2 * chunk.end + 64 and length <= BLOCK:
                group.append(chunk)
                self._groups[-1] = self._groups[-1]._replace(end=row + length)
            else:
                self._groups.append(_Group([chunk], row, row + length))
            row += length
        slots = [
            c.blocks[p // BLOCK] * BLOCK + p % BLOCK for g in self._groups for c in g.chunks for p in range(*c[1:])
        ]
        self._slots = torch.tensor(slots, device=device)
        return order

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Implements `weft.models.layers.block.Cache.attend`."""
        pools = self.pools(layer, k, v)
        for pool, new in zip(pools, (k, v), strict=True):
            new = new[0].transpose(0, 1)[: len(self._slots)]
            pool.flatten(0, 1).index_copy_(0, self._slots.to(pool.device), new.to(pool.dtype))
        outputs = []
        for index, (chunks, begin, end) in enumerate(self._groups):
            many = len(chunks)
            if many == 1 and chunks[0].start == 0:  # no earlier keys
                keys, values = k[:, :, begin:end], v[:, :, begin:end]
                view = self._view(index, layer, q.device)
            else:
                view = self._view(index, layer, q.device)
                keys, values = (
                    pool[view.blocks.flatten()].unflatten(0, (many, -1)).flatten(1, 2)[:, view.first :][:, : view.keys]
                    for pool in pools
                )
                keys, values = keys.transpose(1, 2), values.transpose(1, 2)
            queries = q[0, :, begin:end].unflatten(1, (many, -1)).transpose(0, 1)  # [chunks, heads, seq, head_dim]
            out = attention(queries, keys, values, view.mask)
            outputs.append(out.transpose(0, 1).flatten(1, 2))
        if padding := q.shape[2] - len(self._slots):
            outputs.append(outputs[0].new_zeros(len(outputs[0]), padding, outputs[0].shape[2]))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).unsqueeze(0)

    def pools(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """Returns the pool of a layer's keys and the pool of its values, each `[blocks, BLOCK, kv_heads, head_dim]`.

        The first call for a layer allocates the two pools.

        Args:
            layer: index of the layer.
            k, v: keys and values `[1, kv_heads, tokens, head_dim]`, which determine the shape, dtype and device of the
                pools.
        """
        if layer not in self._pools:
            self._pools[layer] = [x.new_zeros(self.blocks, BLOCK, x.shape[1], x.shape[3]) for x in (k, v)]
        return self._pools[layer]

    def _view(self, index: int, layer: int, device: torch.device) -> _View:
        """Returns the `_View` of the group `index` in a layer. Layers with equal window sizes share one `_View`."""
        key = index, self.windows[layer], device
        if key not in self._views:
            self._views[key] = self._new_view(self._groups[index].chunks, self.windows[layer], device)
        return self._views[key]

    def _new_view(self, chunks: list[Chunk], window: int | None, device: torch.device) -> _View:
        seq, pattern = chunks[0].end - chunks[0].start, self.pattern if window is None else None
        starts = [0 if window is None else max(0, chunk.start - window + 1) for chunk in chunks]
        if len(chunks) == 1:
            (start,), end = starts, chunks[0].end
            blocks = torch.tensor([chunks[0].blocks[start // BLOCK : -(-end // BLOCK)]], device=device)
            view = _View(blocks, start % BLOCK, end - start, None)
            if pattern is None and (window is None or end - start <= window):
                return view
            keys = torch.arange(start, end, device=device).unsqueeze(0)
        else:
            tables = [c.blocks[start // BLOCK : -(-c.end // BLOCK)] for c, start in zip(chunks, starts, strict=True)]
            width = max(map(len, tables))
            # The last block, not another sequence's: masked keys that are NaN would make the output NaN.
            blocks = torch.tensor([[*table, *[table[-1]] * (width - len(table))] for table in tables], device=device)
            view = _View(blocks, 0, width * BLOCK, None)
            first = torch.tensor([start // BLOCK * BLOCK for start in starts], device=device)
            keys = first.unsqueeze(1) + torch.arange(width * BLOCK, device=device)
        begin = torch.tensor([chunk.start for chunk in chunks], device=device)
        queries = (begin.unsqueeze(1) + torch.arange(seq, device=device)).unsqueeze(2)  # [chunks, seq, 1]
        keys = keys.unsqueeze(1)  # [chunks, 1, keys]
        seen = keys <= queries
        if window is not None:
            seen = seen & (keys > queries - window)
        if pattern is not None:
            seen = seen & (pattern(queries, keys) | (keys == queries))  # a query without keys would give NaN
        return view._replace(mask=seen.unsqueeze(1))


def paged_cache(model: Decoder, apart: bool = False) -> PagedCache:
    """Creates the cache of a decoder. It has no blocks until `PagedCache.grow` is called.

    Args:
        model: the decoder.
        apart: whether attention is computed separately for each sequence.
    """
    config: Any = model.config
    windows = [config.sliding_window if config.slides(layer) else None for layer in range(config.num_hidden_layers)]
    # Slopes apply to distances between columns, which padding shifts; softmax ignores the shift, but not with sinks.
    return PagedCache(windows, model.pattern, apart or (config.position == "alibi" and config.attention_sinks))

"""Context parallelism: sequences are sharded over `cp`, and attention communicates. All methods are exact.

- all_to_all (Ulysses; Jacobs et al., 2023): an all-to-all before attention gives each rank some heads of the full
  sequence. A second all-to-all after attention gives each rank all heads of its own tokens, which are consecutive.
- all_gather: each rank all-gathers keys and values, and computes attention for the queries of its own tokens. Under a
  causal mask later queries cost more. To balance the work, a rank has a chunk from the front of the sequence and the
  mirrored chunk from its end. If attention is within documents, each of N ranks has every N-th token, so that the
  ranks divide the work of each document.
- ring (`ring.py`): if the mask is purely causal, keys and values circulate among the ranks, so that each rank stores
  a single shard of them at a time. Otherwise (such as with a window, or attention within documents) the layer uses
  all_gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from weft.config.mesh import choose_cp_method
from weft.config.model import ModelSection
from weft.data.batches.batch import Batch
from weft.kernels.attention import alibi_slopes
from weft.kernels.masks import alibi_mask, flex_usable, pattern_mask, segment_mask, sparse_block_mask
from weft.models.decoder import Decoder
from weft.models.layers.attention import CoreAttention
from weft.models.layers.moe import Router
from weft.models.layers.rope import rotary_depends_on_length
from weft.parallel import collectives
from weft.parallel.axes.ring import ring_attention, ring_usable
from weft.parallel.model_state import ModelState
from weft.parallel.randomness import WeightsDropout, draw_full_sequence

_ABSENT = object()


def shard_over_cp(model: nn.Module, state: ModelState) -> nn.Module:
    """Makes the decoder compute with this rank's shard of each sequence, and attention communicate over `cp`.

    Assumes that `shard_over_tp` has set this rank's heads. Does not change parameters: FSDP2 shards them over
    `dp_shard` x `cp`. Sets `state.sequence_shard`, by which `Passes` shards each batch.
    """
    world = state.world
    if world.shape.cp > 1 and isinstance(model, Decoder):
        method = choose_cp_method(model.config, state.plan.parallel.cp_method, world.shape.cp, world.shape.tp)
        if state.sequence_shard is None:  # an earlier pipeline stage of this rank may have set it
            state.sequence_shard = SequenceShard(model.config, world.group("cp"), method)
        state.sequence_shard.apply(model, state)
    return model


class SequenceShard:
    """Selects this rank's shard of each sequence, and makes a decoder compute with the shard.

    Args:
        config: configuration of the decoder.
        group: process group of `cp`.
        method: communication method of attention: all_to_all, all_gather or ring.
    """

    def __init__(self, config: ModelSection, group: dist.ProcessGroup, method: str):
        self.config, self.group, self.method = config, group, method
        self.needs_lengths = rotary_depends_on_length(config.rope_scaling)
        self.by_document = False  # whether attention is within documents, in the current batch
        # The attributes of each module that `apply` changed, and the values that they had before.
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def positions(self, seq: int, by_document: bool, device: torch.device, rank: int | None = None) -> torch.Tensor:
        """Returns the positions of a rank's tokens in a sequence of `seq` tokens, int64 `[seq / ranks]`.

        Args:
            by_document: whether attention is within documents.
            rank: a rank of `cp`; None means this rank.
        """
        rank, ranks = self.group.rank() if rank is None else rank, self.group.size()
        if self.method == "all_to_all":
            return torch.arange(seq, device=device).chunk(ranks)[rank]
        if by_document:
            return torch.arange(rank, seq, ranks, device=device)
        chunks = torch.arange(seq, device=device).chunk(2 * ranks)
        return torch.cat((chunks[rank], chunks[-1 - rank]))

    def gathered_positions(self, seq: int, by_document: bool, device: torch.device) -> torch.Tensor:
        """Returns the positions of all ranks' tokens in the order in which they are all-gathered, int64 `[seq]`.

        Args:
            by_document: whether attention is within documents.
        """
        ranks = range(self.group.size())
        return torch.cat([self.positions(seq, by_document, device, rank) for rank in ranks])

    def shard(self, batch: Batch) -> Batch:
        """Returns a batch with only this rank's tokens of each sequence; its `segments` cover the full sequences.

        Its `local_segments` are those of this rank's tokens.
        """
        self.by_document = batch.segments is not None
        positions = self.positions(batch.tokens.shape[1], self.by_document, batch.tokens.device)
        local = batch.map_tokens(lambda t, dim: t.index_select(dim, positions))
        return replace(
            local,
            segments=batch.segments,
            local_segments=local.segments,
            share=1 / self.group.size(),
            sum_over_ranks=partial(collectives.all_reduce, group=self.group),
        )

    def gather(self, values: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns the values of all tokens `[batch, seq, ...]`, given those of this rank's shard, on all ranks of `cp`.

        Args:
            batch: the full sequences.
        """
        seq = batch.tokens.shape[1]
        full = values.new_zeros(len(values), seq, *values.shape[2:])
        full[:, self.positions(seq, batch.segments is not None, values.device)] = values
        dist.all_reduce(full, group=self.group)
        return full

    def extra_inputs(self, batch: Batch) -> dict[str, Any]:
        """Returns model inputs that must be computed from full sequences, not from a rank's shard.

        This is `lengths`, the length of each sequence, if the rotary embedding depends on it; otherwise {}.

        Args:
            batch: full sequences.
        """
        return {"lengths": batch.positions.amax(1) + 1} if self.needs_lengths else {}

    def apply(self, model: Decoder, state: ModelState) -> None:
        """Makes masks, attention, dropout and routers of a decoder work with this rank's shard of each sequence."""
        before = [(vars(module), dict(vars(module))) for module in model.modules()]
        masks = self._full_masks if self.method == "all_to_all" else self._query_masks
        state.fill(model, "masks", "cp: masks of full sequences", partial(masks, model, model.masks))
        if self.method == "all_to_all":
            model.heads = self._local_heads(model.heads, self.config.num_attention_heads)
        draw_full_sequence(list(model.modules()), self._local_positions)
        for module in model.modules():
            if isinstance(module, CoreAttention):
                self._wrap_attention(module, state)
            elif isinstance(module, Router):
                all_reduce = partial(collectives.all_reduce, group=self.group, replicated=True)
                state.fill(module, "sum_over_sequence", "cp: all-reduce", all_reduce)
                state.fill(module, "on_full_sequence", "cp: all-gather the chosen experts", self._on_full_sequence)
                module.sequence_shards = self.group.size()
        for now, old in before:
            changed = {name: old.get(name, _ABSENT) for name in now if now[name] is not old.get(name, _ABSENT)}
            self._before += [(now, changed)] * bool(changed)

    @contextmanager
    def full_sequences(self) -> Iterator[None]:
        """Context in which each rank computes full sequences, and nothing is sent over `cp`: for generation."""
        now = [{name: attributes[name] for name in old} for attributes, old in self._before]
        for attributes, old in self._before:
            attributes.update(old)
            for name in [name for name, value in old.items() if value is _ABSENT]:
                del attributes[name]
        try:
            yield
        finally:
            for (attributes, _), values in zip(self._before, now, strict=True):
                attributes.update(values)

    def _wrap_attention(self, module: CoreAttention, state: ModelState) -> None:
        if self.method == "all_to_all":
            module.weights_dropout = WeightsDropout(module)
            start, stop, _ = module.heads.indices(module.num_heads)
            module.local_heads = self._local_heads(slice(None), stop - start)
            module.heads = self._local_heads(module.heads, module.num_heads)
            label = "cp: all-to-all, from tokens to heads and back"
            state.wrap(module, label, partial(_attention_by_all_to_all, self.group))
        else:
            module.weights_dropout = WeightsDropout(module, self._local_queries)
            label = "cp: keys and values by " + ("ring or all-gather" if self.method == "ring" else "all-gather")
            state.wrap(module, label, partial(_attention_by_all_gather, self.group, module.scale))

    def _local_positions(self, tokens: int) -> tuple[int, torch.Tensor]:
        """Returns (length of the full sequence, positions of this rank's tokens in it), for `Dropout.full_sequence`.

        Args:
            tokens: number of this rank's tokens.
        """
        return (seq := tokens * self.group.size()), self.positions(seq, self.by_document, torch.device("cpu"))

    def _local_queries(self, tokens: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Returns (length of the full sequence, positions of this rank's queries, positions of all keys).

        `WeightsDropout` calls this method. The keys are in the order in which they are all-gathered.

        Args:
            tokens: number of this rank's tokens.
        """
        seq, positions = self._local_positions(tokens)
        return seq, positions, self.gathered_positions(seq, self.by_document, positions.device)

    def _on_full_sequence(self, function: Callable, chosen: torch.Tensor) -> torch.Tensor:
        """All-gathers `chosen` over `cp`, applies `function`, and returns this rank's shard of the result.

        Args:
            function: maps a tensor of full sequences `[batch, seq, ...]` to a tensor `[batch, seq, ...]`.
            chosen: values for this rank's tokens, `[batch, seq / ranks, ...]`.
        """
        seq, device = chosen.shape[1] * self.group.size(), chosen.device
        order = self.gathered_positions(seq, self.by_document, device)
        gathered = collectives.all_gather(chosen, 1, self.group, replicated=True)
        full = torch.empty_like(gathered).index_copy_(1, order, gathered)
        return function(full)[:, self.positions(seq, self.by_document, device)]

    def _local_heads(self, heads: slice, count: int) -> slice:
        start, stop, _ = heads.indices(count)
        each = (stop - start) // self.group.size()
        return slice(start + self.group.rank() * each, start + (self.group.rank() + 1) * each)

    def _full_masks(self, model: Decoder, masks: Callable, tokens, positions, segments, dtype):
        """Calls `masks`, the model's method that builds masks, for full sequences. Returns the result.

        Used with all_to_all, where attention runs on full sequences.
        """
        return masks(tokens.repeat(1, self.group.size()), positions, segments, dtype)

    def _query_masks(self, model: Decoder, masks: Callable, tokens, positions, segments, dtype):
        """Returns (mask for layers without a sliding window, mask for layers with the sliding window).

        Masks are for this rank's queries and all keys. Keys are in the order in which they are all-gathered. If a
        mask is None, layers use ring attention instead of the mask.
        """
        config = self.config
        seq, device, by_document = tokens.shape[1] * self.group.size(), tokens.device, segments is not None
        self.by_document = by_document  # only the first stage of a pipeline shards the batch
        queries = self.positions(seq, by_document, device)
        keys = self.gathered_positions(seq, by_document, device)
        full = tokens.new_zeros(1, seq) if segments is None else segments
        plain = config.attn_logit_softcapping is None and not config.attention_sinks and config.position != "alibi"

        usable = ring_usable(device, dtype, config.qk_head_dim)

        def make(window: int | None = None):
            window = None if window is None or window >= seq else window
            dropout = config.attention_dropout if model.training else 0.0
            causal = segments is None and window is None and model.pattern is None
            if self.method == "ring" and plain and causal and dropout == 0 and usable:
                return None
            if flex_usable(device, dtype, config.qk_head_dim, dropout) and config.attention_implementation != "sdpa":
                return sparse_block_mask(full, window, model.pattern, queries, keys)
            if model.pattern is not None:
                visible = pattern_mask(model.pattern, full, queries, keys)
            else:
                visible = segment_mask(full, window, queries, keys)
            if config.position != "alibi":
                return visible
            slopes = alibi_slopes(config.num_attention_heads, config.alibi_bias_max, device)[model.heads]
            return alibi_mask(visible, slopes, dtype, queries, keys)

        mask = make()
        return mask, mask if model.window is None else make(model.window)


def _attention_by_all_to_all(group: dist.ProcessGroup, forward: Callable) -> Callable:
    def call(q, k, v, mask=None):
        q, k, v = (collectives.all_to_all(x, 1, 2, group) for x in (q, k, v))
        return collectives.all_to_all(forward(q, k, v, mask), 2, 1, group)

    return call


def _attention_by_all_gather(group: dist.ProcessGroup, scale: float | None, forward: Callable) -> Callable:
    def call(q, k, v, mask=None):
        if mask is not None:
            # One collective. Values can have a smaller head size than keys.
            k, v = collectives.all_gather(torch.cat((k, v), 3), 2, group).split((k.shape[3], v.shape[3]), 3)
            return forward(q, k, v, mask)
        size = v.shape[3]
        if size < k.shape[3]:  # ring attention needs one head size
            v = F.pad(v, (0, k.shape[3] - size))
        return ring_attention(q, k, v, scale, group)[..., :size]

    return call

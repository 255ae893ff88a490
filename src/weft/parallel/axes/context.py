"""Context parallelism: the tokens of each row lie on several ranks, and attention brings them together.

Three ways, all exact and on any device:

- all-to-all (Ulysses; Jacobs et al., 2023): for attention, ranks exchange tokens for heads. Each has the whole row of
  some of the heads, so it computes as one process does, and the work is equal. A rank has consecutive tokens.
- all-gather of keys and values: each rank computes its own tokens' rows of the attention matrix. Under a causal mask
  later tokens see more. So a rank has a piece from the row's front and one from its end, which together see as much as
  any other rank's; and where documents are kept apart every so-manieth token, so that each document's work is shared.
- a ring (`ring.py`): the same, with the keys and values of one rank at a time, where causality is all that hides keys;
  layers with a window, documents kept apart and the like gather all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from weft.config.mesh import can_exchange_heads
from weft.config.model import ModelSection
from weft.data.batches.batch import Batch
from weft.kernels.attention import alibi_slopes
from weft.kernels.masks import alibi_mask, flex_usable, pattern_mask, segment_mask, sparse_block_mask
from weft.models.decoder import Decoder
from weft.models.layers.attention import CoreAttention
from weft.models.layers.moe import Router
from weft.models.layers.rope import rotary_depends_on_length
from weft.parallel.axes.ring import ring_attention
from weft.parallel.collectives import exchange, gather, gather_copies, sum_copies, sum_parts
from weft.parallel.model_state import ModelState
from weft.parallel.randomness import WeightsDropout, share_row


def way_of(config: ModelSection, chosen: str, cp: int, tp: int) -> str:
    """What `parallel.cp_method` comes to; auto: keys and values are gathered where heads cannot be exchanged."""
    if chosen != "auto":
        return chosen
    groups = config.num_attention_heads if config.mla else config.kv_heads
    return "all_to_all" if can_exchange_heads((config.num_attention_heads, groups), tp, cp) else "all_gather"


def shard_over_cp(model: nn.Module, state: ModelState) -> nn.Module:
    """Have the decoder compute with this rank's tokens of each sequence, and its attention see all of them.

    Assumes that `tp` has taken its heads. Leaves parameters alone: FSDP2 shards them over `dp_shard` x `cp`. The batch
    is split by `Passes`, with the `Context` that is left in the state.
    """
    world = state.world
    if world.shape.cp > 1 and isinstance(model, Decoder):
        way = way_of(model.config, state.plan.parallel.cp_method, world.shape.cp, world.shape.tp)
        known = state.context  # of a pipeline's stage before
        state.context = context = known if isinstance(known, Context) else Context(model.config, world.group("cp"), way)
        context.apply(model, state)
    return model


class Context:
    """Which tokens of each row are this rank's.

    Args:
        group: the ranks of `cp`.
        way: by which attention is computed: all_to_all, all_gather or ring.
    """

    def __init__(self, config: ModelSection, group: dist.ProcessGroup, way: str):
        self.config, self.group, self.way = config, group, way
        self.by_length = rotary_depends_on_length(config.rope_scaling)
        self.apart = False  # whether documents are, in the batch at hand

    def places(self, seq: int, apart: bool, device: torch.device, rank: int | None = None) -> torch.Tensor:
        """The places in a row of `seq` tokens that a rank has, int64 `[seq / ranks]`.

        Args:
            apart: documents are kept apart.
            rank: by default this one.
        """
        rank, ranks = self.group.rank() if rank is None else rank, self.group.size()
        if self.way == "all_to_all":
            return torch.arange(seq, device=device).chunk(ranks)[rank]
        if apart:
            return torch.arange(rank, seq, ranks, device=device)
        pieces = torch.arange(seq, device=device).chunk(2 * ranks)
        return torch.cat((pieces[rank], pieces[-1 - rank]))

    def own(self, batch: Batch) -> Batch:
        """The same rows, with this rank's tokens of each; `segments` stay those of all."""
        self.apart = batch.segments is not None
        places = self.places(batch.tokens.shape[1], self.apart, batch.tokens.device)
        return replace(
            batch.map_tokens(lambda t, dim: t.index_select(dim, places)),
            segments=batch.segments,
            share=1 / self.group.size(),
            sum_over_ranks=partial(sum_parts, group=self.group),
        )

    def extra(self, batch: Batch) -> dict[str, Any]:
        """What the model is told of whole rows."""
        return {"lengths": batch.positions.amax(1) + 1} if self.by_length else {}

    def apply(self, model: Decoder, state: ModelState) -> None:
        """Have attention and the balance of experts look at whole rows."""
        make = self._masks_of_rows if self.way == "all_to_all" else self._masks_of_queries
        state.fill(model, "masks", "cp: of whole sequences", partial(make, model, model.masks))
        if self.way == "all_to_all":
            model.heads = self._head_part(model.heads, self.config.num_attention_heads)
        share_row(list(model.modules()), self._row)
        for module in model.modules():
            if isinstance(module, CoreAttention):
                self._attend(module, state)
            elif isinstance(module, Router):
                over_rows = partial(sum_copies, group=self.group)
                state.fill(module, "sum_over_sequence", "cp: all-reduce", over_rows)
                state.fill(module, "on_full_sequence", "cp: all-gather the choices", self._of_rows)
                module.sequence_shards = self.group.size()

    def _attend(self, module: CoreAttention, state: ModelState) -> None:
        if self.way == "all_to_all":
            module.weights_dropout = WeightsDropout(module)
            start, stop, _ = module.heads.indices(module.num_heads)
            module.local_heads = self._head_part(slice(None), stop - start)
            module.heads = self._head_part(module.heads, module.num_heads)
            state.wrap(module, "cp: all-to-all, heads for tokens and back", partial(_exchanged, self.group))
        else:
            module.weights_dropout = WeightsDropout(module, self._row_and_keys)
            label = "cp: keys and values by " + ("ring or all-gather" if self.way == "ring" else "all-gather")
            state.wrap(module, label, partial(_gathered, self.group, module.scale))

    def _row(self, tokens: int) -> tuple[int, torch.Tensor]:
        """Of so many of a row's tokens: the row's length, and their places."""
        return (seq := tokens * self.group.size()), self.places(seq, self.apart, torch.device("cpu"))

    def _row_and_keys(self, tokens: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """The same, and the places of all keys, in the order in which they are gathered."""
        seq, places = self._row(tokens)
        ranks = range(self.group.size())
        return seq, places, torch.cat([self.places(seq, self.apart, places.device, rank) for rank in ranks])

    def _of_rows(self, find: Callable, chosen: torch.Tensor) -> torch.Tensor:
        """What `find` says of this rank's tokens, `[batch, seq / ranks, ...]`, when it is given whole rows."""
        ranks = self.group.size()
        seq, device = chosen.shape[1] * ranks, chosen.device
        places = torch.cat([self.places(seq, self.apart, device, rank) for rank in range(ranks)])
        whole = gather_copies(chosen, 1, self.group)
        return find(torch.empty_like(whole).index_copy_(1, places, whole))[:, self.places(seq, self.apart, device)]

    def _head_part(self, heads: slice, count: int) -> slice:
        """This rank's of the heads."""
        start, stop, _ = heads.indices(count)
        each = (stop - start) // self.group.size()
        return slice(start + self.group.rank() * each, start + (self.group.rank() + 1) * each)

    def _masks_of_rows(self, model: Decoder, masks: Callable, tokens, positions, segments, cache, dtype):
        """Masks of whole rows: what attention is given after the exchange."""
        return masks(tokens.repeat(1, self.group.size()), positions, segments, cache, dtype)

    def _masks_of_queries(self, model: Decoder, masks: Callable, tokens, positions, segments, cache, dtype):
        """Masks of this rank's queries against all keys, in the order in which the ranks have these; None: a ring."""
        config, ranks = self.config, self.group.size()
        seq, device, apart = tokens.shape[1] * ranks, tokens.device, segments is not None
        self.apart = apart  # of a pipeline's stages only the first is given a batch
        queries = self.places(seq, apart, device)
        keys = torch.cat([self.places(seq, apart, device, rank) for rank in range(ranks)])
        whole = tokens.new_zeros(1, seq) if segments is None else segments

        plain = config.attn_logit_softcapping is None and not config.attention_sinks and config.position != "alibi"

        def make(window: int | None = None):
            window = None if window is None or window >= seq else window
            dropout = config.attention_dropout if model.training else 0.0
            hidden = segments is not None or window is not None or model.pattern is not None
            if self.way == "ring" and plain and not hidden and dropout == 0:
                return None
            if flex_usable(device, dtype, config.qk_head_dim, dropout) and config.attention_implementation != "sdpa":
                return sparse_block_mask(whole, window, model.pattern, queries, keys)
            if model.pattern is not None:
                seen = pattern_mask(model.pattern, whole, queries, keys)
            else:
                seen = segment_mask(whole, window, queries, keys)
            if config.position != "alibi":
                return seen
            slopes = alibi_slopes(config.num_attention_heads, config.alibi_bias_max, device)[model.heads]
            return alibi_mask(seen, slopes, dtype, queries, keys)

        full = make()
        return full, full if model.window is None else make(model.window)


def _exchanged(group: dist.ProcessGroup, forward: Callable) -> Callable:
    def call(q, k, v, mask=None):
        q, k, v = (exchange(x, 1, 2, group) for x in (q, k, v))
        return exchange(forward(q, k, v, mask), 2, 1, group)

    return call


def _gathered(group: dist.ProcessGroup, scale: float | None, forward: Callable) -> Callable:
    def call(q, k, v, mask=None):
        if mask is None:
            return _round(q, k, v, scale, group)
        return forward(q, gather(k, 2, group), gather(v, 2, group), mask)

    return call


def _round(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, group: dist.ProcessGroup):
    """Ring attention, whose kernels want one size of heads."""
    width = v.shape[3]
    if width < k.shape[3]:
        v = F.pad(v, (0, k.shape[3] - width))
    return ring_attention(q, k, v, scale, group)[..., :width]

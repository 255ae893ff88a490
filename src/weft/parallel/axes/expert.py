"""Expert parallelism (Lepikhin et al., 2021): experts lie on different ranks, and tokens travel to theirs and back."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Placement, Shard

from weft.models.decoder import Decoder
from weft.models.layers.moe import Experts, MixtureOfExperts, Permute
from weft.models.sharding import decoder_sharding
from weft.parallel.axes.tensor import placement
from weft.parallel.collectives import exchange_rows
from weft.parallel.local_parameters import distribute_parameters
from weft.parallel.model_state import ModelState


class ExchangedExperts:
    """All experts, as seen from a rank that has some: `Experts` that is called with rows for any of them.

    Ranks first tell one another how many rows come: none is dropped here, and none that was dropped travels.

    Args:
        experts: those that are here, `num_experts / ranks` one after another.
        group: the ranks of `ep`.
    """

    def __init__(self, experts: Experts, group: dist.ProcessGroup):
        self.experts, self.group, self.num_experts = experts, group, experts.num_experts

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """`[rows, width]`, the first expert's first, and where each expert's end -> `[rows, width]`."""
        ranks = self.group.size()
        here = self.num_experts // ranks
        counts = ends.diff(prepend=ends.new_zeros(1)).to(torch.int64)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self.group)
        coming = coming.view(ranks, here)  # from each rank, for each expert
        given, taken = torch.stack((counts.view(ranks, here), coming)).sum(2).tolist()  # at once: a GPU is waited for
        rows = exchange_rows(x, taken, given, self.group)
        # They lie as they came, rank by rank; experts want theirs together.
        which = torch.arange(here, device=x.device).repeat(ranks)
        which = which.repeat_interleave(coming.flatten(), output_size=len(rows))
        order = which.argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        own_ends = coming.sum(0).cumsum(0).to(torch.int32)
        out = Permute.apply(self.experts(Permute.apply(rows, order, back), own_ends), back, order)
        return exchange_rows(out, given, taken, self.group)


def shard_over_ep(model: nn.Module, state: ModelState) -> nn.Module:
    """Shard the decoder's experts over `ep`, and have its mixtures send tokens to the ranks that have them.

    Assumes that `tp` has left the experts' parameters plain. Leaves DTensors on the axes `ep` and, beside a `tp`, that;
    FSDP2 shards them further, over the ranks with the same experts.
    """
    world = state.world
    if world.experts is None or not isinstance(model, Decoder):
        return model
    table = decoder_sharding(model.config, world.shape.tp)

    def placements(module: nn.Module, name: str, parameter: nn.Parameter) -> list[Placement] | None:
        if not isinstance(module, Experts):
            return None
        return [Shard(0)] + ([placement(table, name, parameter)] if world.tensor is not None else [])

    distribute_parameters(model, world.experts, placements)
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            dispatch = partial(_dispatch, module.dispatch, world.experts.get_group("ep"))
            state.fill(module, "dispatch", "ep: all-to-all, tokens to their experts and back", dispatch)
    return model


@torch.compiler.disable
def _dispatch(dispatch, group, experts, *tokens):
    return dispatch(ExchangedExperts(experts, group), *tokens)

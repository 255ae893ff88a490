"""Expert parallelism (Lepikhin et al., 2021): shards experts over `ep`, and dispatches tokens by all-to-all."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Placement, Shard

from weft.models.decoder import Decoder
from weft.models.layers.moe import Experts, MixtureOfExperts, Permute
from weft.models.sharding import decoder_sharding
from weft.parallel import collectives
from weft.parallel.axes.tensor import placement
from weft.parallel.local_parameters import distribute_parameters
from weft.parallel.model_state import ModelState


class ShardedExperts:
    """All experts of a layer, called like `Experts`. Each rank has `num_experts / ranks` consecutive experts.

    A row is the input of one expert for one token. A call sends each row to the rank of the row's expert, and sends the
    expert's output back. The ranks first exchange the numbers of rows, so that buffers have the exact size and no row
    is dropped.

    Args:
        experts: this rank's experts.
        group: process group of `ep`.
    """

    def __init__(self, experts: Experts, group: dist.ProcessGroup):
        self.experts, self.group, self.num_experts = experts, group, experts.num_experts

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Computes the experts' outputs `[rows, hidden]`.

        Args:
            x: this rank's rows for all experts, `[rows, hidden]`, sorted by expert.
            ends: index of the row after the last row of each expert, `[num_experts]`.
        """
        ranks = self.group.size()
        local_experts = self.num_experts // ranks
        counts = ends.diff(prepend=ends.new_zeros(1)).to(torch.int64)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=self.group)
        incoming = incoming.view(ranks, local_experts)  # [source rank, expert]
        # One synchronization with the GPU for both lists.
        sent, received = torch.stack((counts.view(ranks, local_experts), incoming)).sum(2).tolist()
        rows = collectives.all_to_all_rows(x, received, sent, self.group)
        # Received rows are sorted by source rank; experts need them sorted by expert.
        expert = torch.arange(local_experts, device=x.device).repeat(ranks)
        expert = expert.repeat_interleave(incoming.flatten(), output_size=len(rows))
        order = expert.argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        local_ends = incoming.sum(0).cumsum(0).to(torch.int32)
        out = Permute.apply(self.experts(Permute.apply(rows, order, inverse), local_ends), inverse, order)
        return collectives.all_to_all_rows(out, sent, received, self.group)


def shard_over_ep(model: nn.Module, state: ModelState) -> nn.Module:
    """Shards the decoder's experts over `ep`, and dispatches tokens to the ranks of their experts.

    Assumes that `shard_over_tp` has not changed the experts' parameters. Replaces these parameters with DTensors on the
    axis `ep`, and on `tp` if its size is above 1. FSDP2 shards them further, over the ranks with the same experts.
    """
    world = state.world
    if world.ep_mesh is None or not isinstance(model, Decoder):
        return model
    table = decoder_sharding(model.config, world.shape.tp)

    def placements(module: nn.Module, name: str, parameter: nn.Parameter) -> list[Placement] | None:
        if not isinstance(module, Experts):
            return None
        return [Shard(0)] + ([placement(table, name, parameter)] if world.tp_mesh is not None else [])

    distribute_parameters(model, world.ep_mesh, placements)
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            dispatch = partial(_dispatch, module.dispatch, world.ep_mesh.get_group("ep"))
            state.fill(module, "dispatch", "ep: all-to-all, tokens to their experts and back", dispatch)
    return model


@torch.compiler.disable
def _dispatch(dispatch, group, experts, *tokens):
    return dispatch(ShardedExperts(experts, group), *tokens)

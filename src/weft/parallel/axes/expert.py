"""Expert parallelism (Lepikhin et al., 2021): shards experts over `ep`, and dispatches tokens by all-to-all.

A token is sent once to each rank that has at least one of its experts. This rank adds up the outputs of the token's
experts, and sends one row back.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Placement, Shard

from weft.models.decoder import Decoder
from weft.models.layers.moe import Experts, MixtureOfExperts
from weft.models.sharding import decoder_sharding
from weft.parallel import collectives
from weft.parallel.axes.tensor import placement
from weft.parallel.local_parameters import distribute_parameters
from weft.parallel.memory.host_values import once
from weft.parallel.model_state import ModelState


class Copies(NamedTuple):
    """Which copies of which rows a tensor consists of.

    Attributes:
        source: index of the copied row, `[copies]`.
        by_source: indices of the copies, sorted by `source`, `[copies]`.
        ends: index in `by_source` of the first copy of each row, and the number of copies, `[rows + 1]`.
    """

    source: torch.Tensor
    by_source: torch.Tensor
    ends: torch.Tensor

    @staticmethod
    def of(source: torch.Tensor, rows: int) -> Copies:
        by_source = source.argsort(stable=True)
        ends = torch.searchsorted(source[by_source], torch.arange(rows + 1, device=source.device))
        return Copies(source, by_source, ends)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """Copies rows of `x` `[rows, width]`. Returns `[copies, width]`; backward is `sum`."""
        return _Copy.apply(x, self)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sums the copies of each row, `[copies, width]`. Returns `[rows, width]`; backward is `copy`."""
        return _Sum.apply(x, self)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        # A scatter-add would sum in a nondeterministic order on GPUs.
        return F.embedding_bag(self.by_source, x, self.ends, mode="sum", include_last_offset=True)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, copies):
        ctx.copies = copies
        return x[copies.source]

    @staticmethod
    def backward(ctx, grad):
        return ctx.copies._sum(grad.contiguous()), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, copies):
        ctx.copies = copies
        return copies._sum(x)

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.copies.source], None


class Sent(NamedTuple):
    """A dispatch that has started: tokens are on their way to the ranks of their experts.

    Attributes:
        sends: which copies of which of this rank's tokens are sent.
        message: the received rows `[rows, hidden + choices]`, a token and the weights of its choices; not yet awaited.
        choices: which of this rank's experts each row chose, -1 for those of other ranks, int32 `[rows, choices]`.
        sent, received: numbers of rows that this rank sends to, and receives from, each rank.
        computed: number of choices that this rank computes.
    """

    sends: Copies
    message: torch.Tensor
    choices: torch.Tensor
    sent: list[int]
    received: list[int]
    computed: int


@torch.compiler.disable
def send_to_ranks(
    group: dist.ProcessGroup,
    experts: Experts,
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    dropped: torch.Tensor | None = None,
) -> Sent:
    """Starts `weft.models.layers.moe.dispatch` with experts that are sharded over `group`, in equal numbers.

    The ranks first exchange the numbers of rows and of choices, so that buffers have the exact size. The host waits for
    these numbers, but not again when activation checkpointing recomputes the layer.

    Args:
        experts: this rank's experts. They are consecutive, and ordered by rank.
        x: this rank's tokens, `[tokens, hidden]`; `weights`, `chosen` and `dropped` are those of these tokens.
    """
    ranks, local_experts = group.size(), experts.num_experts // group.size()
    rank_of = chosen // local_experts
    if dropped is not None:
        rank_of = rank_of.masked_fill(dropped, ranks)
    to_rank = rank_of.unsqueeze(1) == torch.arange(ranks, device=x.device).unsqueeze(1)  # [tokens, ranks, choices]
    goes = to_rank.any(2)

    def exchange() -> tuple[list[list[int]], list[list[int]]]:
        counts = torch.stack((goes.sum(0), to_rank.sum((0, 2))), 1)  # [ranks, (rows, choices)]
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=group)
        outgoing, expected = torch.stack((counts, incoming)).tolist()  # one synchronization with the GPU
        return outgoing, expected

    outgoing, expected = once(exchange)
    sent, received = [rows for rows, _ in outgoing], [rows for rows, _ in expected]
    rank, token = torch.nonzero_static(goes.t(), size=sum(sent)).unbind(1)

    def exchange_choices() -> torch.Tensor:
        local = torch.where(rank_of[token] == rank.unsqueeze(1), chosen[token] - rank.unsqueeze(1) * local_experts, -1)
        choices = local.new_empty((sum(received), chosen.shape[1]), dtype=torch.int32)
        dist.all_to_all_single(choices, local.to(torch.int32), received, sent, group=group)
        return choices

    choices, sends = once(exchange_choices), Copies.of(token, len(x))
    message = sends.copy(torch.cat((x, weights), 1))
    message = collectives.all_to_all_rows(message, received, sent, group)
    return Sent(sends, message, choices, sent, received, sum(number for _, number in expected))


@torch.compiler.disable
def compute_sent(group: dist.ProcessGroup, experts: Experts, dispatched: Sent) -> torch.Tensor:
    """Waits for the tokens of `send_to_ranks`, computes this rank's experts, and sends the outputs back.

    Returns:
        The result of `weft.models.layers.moe.dispatch` for this rank's tokens.
    """
    sends, message, choices, sent, received, number = dispatched
    per_token = choices.shape[1]
    rows, row_weights = message.split((message.shape[1] - per_token, per_token), 1)
    choices = choices.flatten()
    computed = torch.nonzero_static(choices >= 0, size=number).squeeze(1)
    by_expert, order = choices[computed].sort(stable=True)
    computed = computed[order]
    local_experts = torch.arange(experts.num_experts // group.size(), device=message.device)
    ends = torch.searchsorted(by_expert, local_experts, right=True)
    copies = Copies.of(computed // per_token, len(rows))
    out = experts(copies.copy(rows), ends.to(torch.int32))
    out = copies.sum(out * row_weights.flatten().gather(0, computed).unsqueeze(1))
    return sends.sum(collectives.all_to_all_rows(out, sent, received, group))


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
            group = world.ep_mesh.get_group("ep")
            state.fill(module, "send", "ep: all-to-all, tokens to their experts", partial(send_to_ranks, group))
            state.fill(module, "dispatch", "ep: experts, all-to-all back", partial(compute_sent, group))
    return model

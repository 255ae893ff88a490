"""Expert parallelism (Lepikhin et al., 2021): experts lie on different ranks, and tokens travel to theirs and back."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from weft.models.layers.experts import Experts, MixtureOfExperts, Permuted
from weft.parallel.collectives import exchange_rows


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
        out = Permuted.apply(self.experts(Permuted.apply(rows, order, back), own_ends), back, order)
        return exchange_rows(out, given, taken, self.group)


def exchange_tokens(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Have all mixtures of experts send tokens to the ranks of `ep`."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.dispatch = partial(_dispatch, module.dispatch, group)


@torch.compiler.disable
def _dispatch(dispatch, group, experts, *tokens):
    return dispatch(ExchangedExperts(experts, group), *tokens)

"""What ranks tell one another inside of forward and backward, each with the gradient that its use calls for.

All of them are differentiable, take the group of a mesh axis, and split or join one dimension in equal parts.
"""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed import ProcessGroup

# PyTorch 2.13 has new names for three of them.
_all_gather = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd
_all_gather_copies = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_reduce_scatter = getattr(funcol, "reduce_scatter_single_autograd", None) or funcol.reduce_scatter_tensor_autograd


def gather(x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """All ranks' parts, joined along `dim`. Each rank uses the whole: the gradients of all uses are summed."""
    return _all_gather(x.contiguous(), dim, group)


def scatter_sum(x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """The sum of all ranks' tensors, of which each keeps its part of `dim`."""
    return _reduce_scatter(x.contiguous(), "sum", dim, group)


def exchange(x: torch.Tensor, split: int, join: int, group: ProcessGroup) -> torch.Tensor:
    """Give each rank its part of dimension `split`, and join along `join` what is received."""
    parts = torch.stack(x.chunk(group.size(), split))  # [ranks, ...]
    received = exchange_rows(parts.flatten(0, 1), None, None, group).view_as(parts)
    return torch.cat(received.unbind(), join)


def exchange_rows(
    x: torch.Tensor, received: list[int] | None, given: list[int] | None, group: ProcessGroup
) -> torch.Tensor:
    """Give the first `given[0]` rows to the first rank and so on; the first `received[0]` rows are the first rank's.

    None: alike parts.
    """
    return funcol.all_to_all_single_autograd(x.contiguous(), received, given, group)


class _GatherCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return funcol.wait_tensor(_all_gather_copies(x.contiguous(), dim, group))

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()], None, None


def gather_copies(x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """As `gather`, where all ranks go on alike with the whole: one rank's gradient is the gradient."""
    return _GatherCopies.apply(x, dim, group)


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return funcol.wait_tensor(funcol.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def sum_copies(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum of all ranks' tensors, where all go on alike with it: one rank's gradient is the gradient."""
    return _SumCopies.apply(x, group)


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return funcol.wait_tensor(funcol.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx, grad):
        return funcol.wait_tensor(funcol.all_reduce(grad.contiguous(), "sum", ctx.group)), None


def sum_parts(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum of all ranks' tensors, where each goes on with it in its own way: the gradients are summed too."""
    return _SumParts.apply(x, group)

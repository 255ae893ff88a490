"""What ranks tell one another inside of forward and backward, each with the gradient that its use calls for.

All of them are differentiable, take the group of a mesh axis, and split or join one dimension in equal parts.
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from weft import torch_private as private


def gather(x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """All ranks' parts, joined along `dim`. Each rank uses the whole: the gradients of all uses are summed."""
    return private.all_gather_autograd(x.contiguous(), dim, group)


def scatter_sum(x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """The sum of all ranks' tensors, of which each keeps its part of `dim`."""
    return private.reduce_scatter_autograd(x.contiguous(), "sum", dim, group)


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
    return private.all_to_all_autograd(x.contiguous(), received, given, group)


class _GatherCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return private.wait_tensor(private.all_gather(x.contiguous(), dim, group))

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()], None, None


def gather_copies(x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """As `gather`, where all ranks go on alike with the whole: one rank's gradient is the gradient."""
    return _GatherCopies.apply(x, dim, group)


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return private.wait_tensor(private.all_reduce(x.contiguous(), "sum", group))

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
        return private.wait_tensor(private.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx, grad):
        return private.wait_tensor(private.all_reduce(grad.contiguous(), "sum", ctx.group)), None


def sum_parts(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum of all ranks' tensors, where each goes on with it in its own way: the gradients are summed too."""
    return _SumParts.apply(x, group)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns `x`, and multiplies its gradient by `factor`."""
    return _ScaleGradient.apply(x, factor)

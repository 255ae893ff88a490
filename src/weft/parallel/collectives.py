"""Differentiable collectives over the process group of a mesh axis.

Use them as `collectives.all_gather` and so on: torch.distributed has functions of the same names, without gradients.
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from weft import torch_private as private


def all_gather(x: torch.Tensor, dim: int, group: ProcessGroup, *, replicated: bool = False) -> torch.Tensor:
    """Concatenates all ranks' tensors along `dim`.

    Args:
        replicated: all ranks compute the same with the result, so each rank's gradient of it is the full gradient, and
            backward takes a slice of it. By default gradients of the result are partial, and backward reduce-scatters.
    """
    if replicated:
        return _AllGatherReplicated.apply(x, dim, group)
    return private.all_gather_autograd(x.contiguous(), dim, group)


def reduce_scatter(x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """Sums all ranks' tensors; each rank keeps its shard of `dim`."""
    return private.reduce_scatter_autograd(x.contiguous(), "sum", dim, group)


def all_reduce(x: torch.Tensor, group: ProcessGroup, *, replicated: bool = False) -> torch.Tensor:
    """Sums all ranks' tensors. `replicated` is as in `all_gather`; by default backward all-reduces the gradient."""
    return _AllReduce.apply(x, group, replicated)


def all_to_all(x: torch.Tensor, split_dim: int, concat_dim: int, group: ProcessGroup) -> torch.Tensor:
    """Sends each rank its slice of `split_dim`, and concatenates the received slices along `concat_dim`."""
    slices = torch.stack(x.chunk(group.size(), split_dim))  # [ranks, ...]
    received = all_to_all_rows(slices.flatten(0, 1), None, None, group).view_as(slices)
    return torch.cat(received.unbind(), concat_dim)


def all_to_all_rows(
    x: torch.Tensor, received: list[int] | None, sent: list[int] | None, group: ProcessGroup
) -> torch.Tensor:
    """Sends `sent[i]` rows to rank i, in order, and receives `received[i]` rows from it. None: equal numbers."""
    return private.all_to_all_autograd(x.contiguous(), received, sent, group)


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns `x`; in backward, multiplies its gradient by `factor`."""
    return _ScaleGradient.apply(x, factor)


class _AllGatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return private.wait_tensor(private.all_gather(x.contiguous(), dim, group))

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()], None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, replicated):
        ctx.group, ctx.replicated = group, replicated
        return private.wait_tensor(private.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx, grad):
        if not ctx.replicated:
            grad = private.wait_tensor(private.all_reduce(grad.contiguous(), "sum", ctx.group))
        return grad, None, None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None

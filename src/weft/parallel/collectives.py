"""Defines differentiable collectives over the process group of a mesh axis.

Call them with the module's name (`collectives.all_gather`): torch.distributed has functions with the same names that
are not differentiable.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from weft.parallel import torch_private as private

# Not differentiable: gathers a tensor of each rank into one. PyTorch 2.13 has a new name for it.
ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(x: torch.Tensor, dim: int, group: ProcessGroup, *, replicated: bool = False) -> torch.Tensor:
    """Concatenates all ranks' tensors along `dim`.

    Args:
        replicated: whether all ranks compute the same values from the result. Then each rank has the full gradient of
            the result, and backward returns this rank's slice of this gradient. Otherwise (default) each rank has a
            partial gradient, and backward reduce-scatters.
    """
    dim %= x.ndim  # PyTorch 2.13 fails with a negative dim if all dims before it have size 1
    return _AllGather.apply(x, dim, group, replicated)


def reduce_scatter(x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """Sums all ranks' tensors, splits the sum along `dim`, and returns this rank's shard."""
    return private.reduce_scatter_autograd(x.contiguous(), "sum", dim, group)


def all_reduce(x: torch.Tensor, group: ProcessGroup, *, replicated: bool = False) -> torch.Tensor:
    """Sums all ranks' tensors.

    Args:
        replicated: whether all ranks compute the same values from the sum. Then backward returns the gradient
            unchanged. Otherwise (default) each rank has a partial gradient, and backward all-reduces.
    """
    return _AllReduce.apply(x, group, replicated)


def all_to_all(x: torch.Tensor, split_dim: int, concat_dim: int, group: ProcessGroup) -> torch.Tensor:
    """Sends the i-th slice of `x` along `split_dim` to rank i, and concatenates received slices along `concat_dim`."""
    slices = torch.stack(x.chunk(group.size(), split_dim))  # [ranks, ...]
    received = all_to_all_rows(slices.flatten(0, 1), None, None, group).view_as(slices)
    return torch.cat(received.unbind(), concat_dim)


def all_to_all_rows(
    x: torch.Tensor, received: list[int] | None, sent: list[int] | None, group: ProcessGroup
) -> torch.Tensor:
    """Sends `sent[i]` rows of `x` to rank i, and returns the received rows: `received[i]` rows from rank i.

    Rows are in the order of ranks, in `x` and in the result. If `sent` or `received` is None, this rank sends or
    receives the same number of rows for each rank.
    """
    return private.all_to_all_autograd(x.contiguous(), received, sent, group)


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns `x` unchanged; backward multiplies the gradient of `x` by `factor`."""
    return _ScaleGradient.apply(x, factor)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group, replicated):
        ctx.dim, ctx.group, ctx.replicated = dim, group, replicated
        return private.wait_tensor(private.all_gather(x.contiguous(), dim, group))

    @staticmethod
    def backward(ctx, grad):
        if ctx.replicated:
            grad = grad.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()]
        else:
            grad = private.wait_tensor(private.reduce_scatter_autograd(grad.contiguous(), "sum", ctx.dim, ctx.group))
        return grad, None, None, None


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

"""What ranks do in the tests of `weft.register_op`."""

import copy

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import weft
from weft.planner.parallelize.plan import Plan

seen = []


class _Scale(torch.autograd.Function):
    """An autograd function that DTensor cannot look into."""

    @staticmethod
    def forward(ctx, x, weight):
        seen.append((tuple(x.shape), isinstance(x, DTensor)))
        ctx.save_for_backward(x, weight)
        return x.numpy(force=True).sum() * 0 + x * weight  # numpy: only plain tensors

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0)


@weft.register_op("b d, d -> b d")
def scale(x, weight):
    return _Scale.apply(x, weight)


@weft.register_op("b k+, n k+ -> b n")
def product(x, weight):
    return x.numpy(force=True).sum() * 0 + x @ weight.T


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.weight = nn.Parameter(torch.randn(8))
        self.out = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return product(scale(self.inner(x), self.weight), self.out)


def equal_to_one_process(cases):
    """For each plan: the largest difference of loss and gradients, and the shapes that the operation got."""
    torch.set_default_dtype(torch.float64)
    found = []
    for tables in cases:
        torch.manual_seed(0)
        reference = Net()
        module = Plan(**tables).apply(copy.deepcopy(reference))
        x = torch.randn(4, 6)
        reference(x).square().sum().backward()
        seen.clear()
        loss = module(x).square().sum()
        loss.backward()
        worst = abs(loss.item() - reference(x).square().sum().item())
        for one, other in zip(reference.parameters(), module.parameters(), strict=True):
            worst = max(worst, (one.grad - other.grad.full_tensor()).abs().max().item())
        found.append((worst, seen[0]))
    return found


COLUMNS = {"inner.*": Shard(0), "weight": Shard(0), "out": Shard(1)}

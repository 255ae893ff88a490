"""A single rank: nothing is sharded, so nothing is gathered, and FSDP2, which would copy all the same, is not used.

This is the one exception to one path for all meshes. Parameters are DTensors as on any mesh (one of a single rank), and
forwards compute with the plain tensors beneath them, in the dtype of computing: what FSDP2's policy does elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from weft.models.decoder import Decoder
from weft.parallel.local_parameters import distribute_parameters, local
from weft.parallel.model_state import ModelPlan, ModelState, repeated_blocks
from weft.parallel.world import World
from weft.torch_private import dtensor_like, version_of


def is_single_rank(plan: ModelPlan, world: World) -> bool:
    """Whether there is nothing that FSDP2 would be needed for: nor another home, nor sums in a dtype of their own."""
    summed = (None, plan.state_dtype)
    return world.ranks == 1 and plan.parallel.offload != "parameters" and plan.reduce_dtype in summed


def place_on_rank(model: nn.Module, state: ModelState) -> nn.Module:
    """Make parameters DTensors on the mesh of one. Assumes plain parameters."""
    distribute_parameters(
        model, state.world.fsdp, lambda _, __, parameter: [Shard(0) if parameter.ndim else Replicate()]
    )
    return model


def compute_on_single_rank(model: nn.Module, state: ModelState) -> nn.Module:
    """Have the model's outputs, and the decoder's residual stream between its blocks, in the state's dtype.

    FSDP2's policy does so elsewhere. Assumes that all other wrappers are in place; leaves the outermost.
    """
    dtype = state.plan.state_dtype
    for module in (*repeated_blocks(model), model) if isinstance(model, Decoder) else (model,):
        state.wrap(module, f"output in {dtype}", partial(_widened, dtype=dtype))
    return model


def _widened(forward: Callable, dtype: torch.dtype) -> Callable:
    @wraps(forward)
    def call(*arguments, **named):
        out = forward(*arguments, **named)
        return out.to(dtype) if isinstance(out, torch.Tensor) and out.is_floating_point() else out

    return call


@dataclass
class _Kept:
    """Of one parameter: the leaf whose gradient is the parameter's, and the parameter as it was last rounded."""

    parameter: DTensor
    leaf: torch.Tensor | None = None
    rounded: torch.Tensor | None = None
    version: int = -1


class SingleRankParameters:
    """Gives all of a parameter to compute with, in `dtype`. What that gets as a gradient is the parameter's."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.kept: dict[int, _Kept] = {}  # by the parameter's id, which is fast to look up

    def __call__(self, parameter: DTensor) -> torch.Tensor:
        """The plain tensor of a DTensor on a mesh of one."""
        whole = local(parameter)
        kept = self.kept.get(id(parameter))
        if kept is None:
            kept = self.kept[id(parameter)] = _Kept(parameter)
        if not torch.is_grad_enabled() or not parameter.requires_grad:
            return self._rounded(kept, whole)
        kept.rounded, leaf = None, kept.leaf
        if leaf is None or leaf.data_ptr() != whole.data_ptr() or leaf.dtype != whole.dtype:
            leaf = kept.leaf = whole.detach().requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(_hand_over, parameter))
        return leaf.to(self.dtype)

    def _rounded(self, kept: _Kept, whole: torch.Tensor) -> torch.Tensor:
        """Rounded once for as long as nothing changes it: a validation, or a text that is generated, asks often."""
        if whole.dtype == self.dtype:
            return whole
        rounded, version = kept.rounded, version_of(whole)
        if rounded is None or kept.version != version or rounded.device != whole.device:
            rounded = kept.rounded = whole.to(self.dtype)
            kept.version = version
        return rounded


def _hand_over(parameter: DTensor, leaf: torch.Tensor) -> None:
    grad, leaf.grad = leaf.grad, None
    if grad is None:
        return
    if parameter.grad is None:
        parameter.grad = dtensor_like(grad, parameter)
    else:
        local(parameter.grad).add_(grad)

"""A single rank, without FSDP2: nothing is sharded, and FSDP2 would copy parameters all the same.

Parameters are DTensors on a mesh of one rank. Forwards compute with their local tensors, cast to the compute dtype as
FSDP2's policy does.
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
    """Whether FSDP2 is not needed: one rank, no offloaded parameters, no separate dtype of gradient reductions."""
    reduce_in_state_dtype = plan.reduce_dtype in (None, plan.state_dtype)
    return world.ranks == 1 and plan.parallel.offload != "parameters" and reduce_in_state_dtype


def place_on_rank(model: nn.Module, state: ModelState) -> nn.Module:
    """Makes parameters DTensors on the mesh of one rank. Assumes plain parameters."""
    distribute_parameters(
        model, state.world.fsdp_mesh, lambda _, __, parameter: [Shard(0) if parameter.ndim else Replicate()]
    )
    return model


def compute_on_single_rank(model: nn.Module, state: ModelState) -> nn.Module:
    """Casts the model's outputs, and the decoder's residual stream between blocks, to the state's dtype.

    Assumes that all other wrappers are in place.
    """
    dtype = state.plan.state_dtype
    for module in (*repeated_blocks(model), model) if isinstance(model, Decoder) else (model,):
        state.wrap(module, f"output in {dtype}", partial(_cast_output, dtype=dtype))
    return model


def _cast_output(forward: Callable, dtype: torch.dtype) -> Callable:
    @wraps(forward)
    def call(*arguments, **named):
        out = forward(*arguments, **named)
        return out.to(dtype) if isinstance(out, torch.Tensor) and out.is_floating_point() else out

    return call


@dataclass
class _Cached:
    """Of one parameter: a leaf that accumulates its gradient, and the parameter cast to the compute dtype."""

    leaf: torch.Tensor | None = None
    cast: torch.Tensor | None = None
    version: int = -1


class SingleRankParameters:
    """Returns a parameter's full tensor in `dtype`. Gradients of it go to the parameter."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.cached: dict[int, _Cached] = {}  # by the parameter's id, which is fast to look up

    def __call__(self, parameter: DTensor) -> torch.Tensor:
        """The plain tensor of a DTensor on a mesh of one rank."""
        tensor = local(parameter)
        cached = self.cached.get(id(parameter))
        if cached is None:
            cached = self.cached[id(parameter)] = _Cached()
        if not torch.is_grad_enabled() or not parameter.requires_grad:
            return self._cast(cached, tensor)
        cached.cast, leaf = None, cached.leaf
        if leaf is None or leaf.data_ptr() != tensor.data_ptr() or leaf.dtype != tensor.dtype:
            leaf = cached.leaf = tensor.detach().requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(_move_gradient, parameter))
        return leaf.to(self.dtype)

    def _cast(self, cached: _Cached, tensor: torch.Tensor) -> torch.Tensor:
        """Casts once until the parameter changes: validation and generation call many forwards."""
        if tensor.dtype == self.dtype:
            return tensor
        cast, version = cached.cast, version_of(tensor)
        if cast is None or cached.version != version or cast.device != tensor.device:
            cast = cached.cast = tensor.to(self.dtype)
            cached.version = version
        return cast


def _move_gradient(parameter: DTensor, leaf: torch.Tensor) -> None:
    grad, leaf.grad = leaf.grad, None
    if grad is None:
        return
    if parameter.grad is None:
        parameter.grad = dtensor_like(grad, parameter)
    else:
        local(parameter.grad).add_(grad)

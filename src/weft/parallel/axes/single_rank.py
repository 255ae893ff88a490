"""Transformations that replace FSDP2 where the model, or each of its replicas, is on a single rank.

FSDP2 would copy parameters and gradients without need. Parameters are DTensors that are not sharded. Forward passes use
the local tensors of parameters, cast to the compute dtype as in FSDP2's mixed-precision policy. Replicas all-reduce
gradients in buckets, during backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from weft.models.decoder import Decoder
from weft.parallel.gradients.buckets import ReplicaSums
from weft.parallel.local_parameters import distribute_parameters, local
from weft.parallel.model_state import ModelPlan, ModelState, repeated_blocks
from weft.parallel.torch_private import at_end_of_backward
from weft.parallel.world import World
from weft.torch_private import backward_number, dtensor_like, storage_of, version_of


def is_single_rank(plan: ModelPlan, world: World) -> bool:
    """Whether this module replaces FSDP2: a model or replica on one rank, whose parameters are not offloaded, and whose
    gradients are reduced in `state_dtype`, by this module.
    """
    reduce_in_state_dtype = plan.reduce_dtype in (None, plan.state_dtype) and plan.parallel.compress is None
    on_one_rank = world.ranks == world.shape.dp_replicate
    return on_one_rank and plan.parallel.offload != "parameters" and reduce_in_state_dtype


def place_on_rank(model: nn.Module, state: ModelState) -> nn.Module:
    """Replaces parameters with DTensors that are not sharded. Assumes plain parameters.

    Their placements are those of FSDP2: replicated over `dp_replicate`, and sharded over one rank.
    """
    mesh = state.world.fsdp_mesh
    replicated = [Replicate()] * (mesh.ndim - 1)
    distribute_parameters(
        model, mesh, lambda _, __, parameter: [*replicated, Shard(0) if parameter.ndim else Replicate()]
    )
    return model


def cast_outputs(model: nn.Module, state: ModelState) -> nn.Module:
    """Casts the model's outputs, and the decoder's residual stream between blocks, to the dtype of parameters.

    This dtype is `ModelPlan.state_dtype`. Must be the last transformation, outside of all other wrappers.
    """
    dtype = state.plan.state_dtype
    for module in (*repeated_blocks(model), model) if isinstance(model, Decoder) else (model,):
        state.wrap(module, f"cast the output to {dtype}", partial(_cast_output, dtype=dtype))
    return model


def _cast_output(forward: Callable, dtype: torch.dtype) -> Callable:
    @wraps(forward)
    def call(*arguments, **named):
        out = forward(*arguments, **named)
        return out.to(dtype) if isinstance(out, torch.Tensor) and out.is_floating_point() else out

    return call


@dataclass
class _Cached:
    """Cached tensors of one parameter.

    Attributes:
        leaf: local tensor that requires a gradient and accumulates it.
        cast: local tensor cast to the compute dtype.
        version: version of the local tensor when `cast` was computed.
    """

    leaf: torch.Tensor | None = None
    cast: torch.Tensor | None = None
    version: int = -1


class SingleRankParameters:
    """Callable that returns a DTensor parameter's full tensor in `dtype`. Gradients accumulate in the DTensor.

    The first gradients move to their DTensors together, at the end of backward. Between the operators of backward, the
    Python code that moves one takes 0.16 ms on a CPU, because their data displaces it from the caches; after another
    one, 0.01 ms. Later gradients are added at once, so that the gradients of two micro-batches never need memory.

    Args:
        sums: sums gradients over replicas; None without replicas.
    """

    def __init__(self, dtype: torch.dtype, sums: ReplicaSums | None = None):
        self.dtype, self.sums = dtype, sums
        self.cached: dict[int, _Cached] = {}  # key: id of the parameter, which is fast to look up
        self.arrived: list[tuple[DTensor, torch.Tensor]] = []  # parameters and leaves whose gradients move at the end
        self.backward: int | None = None  # the backward pass at whose end they move

    def __call__(self, parameter: DTensor) -> torch.Tensor:
        """Returns the plain tensor, cast to `dtype`, of a DTensor parameter that is not sharded."""
        tensor = local(parameter)
        cached = self.cached.get(id(parameter))
        if cached is None:
            cached = self.cached[id(parameter)] = _Cached()
        if not torch.is_grad_enabled() or not parameter.requires_grad:
            return self._cast(cached, tensor)
        while self.arrived and backward_number() is None:  # the last backward pass failed: its gradients do not count
            self.arrived.pop()[1].grad = None
        cached.cast, leaf = None, cached.leaf
        if leaf is None or storage_of(leaf) != storage_of(tensor) or leaf.dtype != tensor.dtype:
            leaf = cached.leaf = tensor.detach().requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(self._take_gradient, parameter))
        return leaf.to(self.dtype)

    def _cast(self, cached: _Cached, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor` cast to `dtype`. The cast is cached for later calls until the parameter changes."""
        if tensor.dtype == self.dtype or not tensor.is_floating_point():  # integers: quantized weights
            return tensor
        cast, version = cached.cast, version_of(tensor)
        if cast is None or cached.version != version or cast.device != tensor.device:
            cast = cached.cast = tensor.to(self.dtype)
            cached.version = version
        return cast

    def _take_gradient(self, parameter: DTensor, leaf: torch.Tensor) -> None:
        if self.sums is not None or parameter.grad is not None:
            self._move_gradient(parameter, leaf)
            return
        if self.backward != backward_number():
            self.backward = backward_number()
            at_end_of_backward(self._move_gradients)
        self.arrived.append((parameter, leaf))

    def _move_gradients(self) -> None:
        while self.arrived:
            self._move_gradient(*self.arrived.pop())

    def _move_gradient(self, parameter: DTensor, leaf: torch.Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        if grad is None:
            return
        if parameter.grad is None:
            parameter.grad = dtensor_like(grad, parameter)
        else:
            local(parameter.grad).add_(grad)
        if self.sums is not None:
            self.sums.add(parameter)

"""FSDP2 (Zhao et al., 2023): shards parameters, gradients and optimizer state over `dp_shard` x `cp`."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from weft.models.decoder import Decoder
from weft.models.layers.moe import Experts
from weft.parallel.fp8 import AllGatherInFP8, weights_of_rows
from weft.parallel.local_parameters import distribute_parameters, local, local_with_grad
from weft.parallel.memory.offload import offload_policy
from weft.parallel.model_state import ModelPlan, ModelState, repeated_blocks
from weft.parallel.stages import embeds_at_end
from weft.parallel.torch_private import all_gather_in_background, shard_integers
from weft.parallel.world import World
from weft.torch_private import dtensor_like


def replicate_scalars(model: nn.Module, state: ModelState) -> nn.Module:
    """Replaces scalar parameters with DTensors that are replicated over all ranks: FSDP2 cannot shard scalars.

    Assumes that scalar parameters are still plain after `shard_over_tp` and `shard_over_ep`. `MeshParameters` casts
    scalars and reduces their gradients.
    """
    mesh = state.world.fsdp_mesh
    replicated = [Replicate()] * mesh.ndim
    distribute_parameters(model, mesh, lambda _, __, parameter: None if parameter.ndim else replicated)
    return model


def separate_ends(model: nn.Module, state: ModelState) -> nn.Module:
    """Unless `embeds_at_end`, makes the embedding and the head of a decoder FSDP2 units.

    Then their weights are only gathered while they compute, and the head's gradient is reduced during backward.

    The head's own forward, which the decoder does not call, becomes a call of the function that `Decoder.run_head`
    gets, so that FSDP2's hooks run around this function.
    """
    if isinstance(model, Decoder) and not embeds_at_end(model.config):
        state.ends[model] = [module for module in (model.embed_tokens, model.lm_head) if module is not None]
        if model.lm_head is not None:
            state.wrap(model.lm_head, "runs the head's function", lambda _: operator.call)
            state.fill(model, "run_head", "the head's forward", model.lm_head.__call__)
    return model


class MeshParameters:
    """Callable that returns, for a DTensor parameter, the plain tensor that this rank computes with.

    FSDP2 casts parameters and reduces gradients, except for scalars. This class casts scalars, and all-reduces the
    gradients of scalars in every backward pass.
    """

    def __init__(self, plan: ModelPlan, world: World):
        axes = ["dp_shard", "cp", "tp"] if plan.parallel.compress else ["dp_replicate", "dp_shard", "cp", "tp"]
        self.groups = [world.group(axis) for axis in axes if world.shape.sizes[axis] > 1]
        self.dtype, self.state_dtype, self.device = plan.dtype, plan.state_dtype, world.device

    def __call__(self, parameter: DTensor) -> torch.Tensor:
        return local_with_grad(parameter) if parameter.ndim else _Scalar.apply(parameter, self)


class _Scalar(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter, settings):
        ctx.parameter, ctx.settings = parameter, settings
        return local(parameter).to(settings.device, settings.dtype, copy=True)

    @staticmethod
    def backward(ctx, grad):
        total = grad.to(ctx.settings.state_dtype, copy=True)
        for group in ctx.settings.groups:
            dist.all_reduce(total, group=group)
        return dtensor_like(total.to(ctx.parameter.device), ctx.parameter), None


def shard_over_data(model: nn.Module, state: ModelState) -> nn.Module:
    """Applies FSDP2 with its mixed-precision policy to units of `layers_per_fsdp_unit` blocks, to the embedding and
    the head if `separate_ends` made them units, and to the model.

    Must be the last transformation, so that other wrappers run inside of FSDP2's hooks. Replaces every parameter except
    scalars with a DTensor sharded over `dp_shard` x `cp`, even if the size of this combined axis is 1. Gradients are
    summed over ranks.
    """
    world, parallel, blocks = state.world, state.plan.parallel, repeated_blocks(model)
    policy = MixedPrecisionPolicy(
        param_dtype=state.plan.dtype,
        reduce_dtype=state.plan.reduce_dtype or state.plan.state_dtype,
        output_dtype=state.plan.state_dtype,
        cast_forward_inputs=False,
    )
    # Only the decoder's residual stream has `state_dtype`. Layers of other models, and experts, need inputs in the
    # dtype of their weights, so their outputs are not cast.
    compute_policy = replace(policy, output_dtype=None)
    block_policy = policy if isinstance(model, Decoder) else compute_policy
    size = parallel.layers_per_fsdp_unit
    units = [blocks[first : first + size] for first in range(0, len(blocks), size)]
    # Backward starts with the root module, the head and the last unit: resharding them after forward would be wasted.
    last = {module for block in units[-1] for module in block.modules()} if units else set()
    scalars = {parameter for parameter in model.parameters() if not parameter.ndim}
    wrap = partial(_wrap, state=state, scalars=scalars)
    if world.ep_fsdp_mesh is not None:
        for module in model.modules():
            if isinstance(module, Experts):
                wrap([module], world.ep_fsdp_mesh, compute_policy, reshard=module not in last)
    for unit in units:
        wrap(unit, world.fsdp_mesh, block_policy, reshard=unit[0] not in last)
    for end in state.ends[model]:
        is_embedding = isinstance(end, nn.Embedding)
        wrap([end], world.fsdp_mesh, compute_policy, reshard=is_embedding)
        if is_embedding:  # its gradient does not depend on its weight
            end.set_unshard_in_backward(False)  # pyright: ignore[reportCallIssue]
    wrap([model], world.fsdp_mesh, policy, reshard=False)
    # The host of a rank with sharded experts waits for the device in each layer, so FSDP2 alone would start the next
    # all-gather only afterwards. On gloo, it would wait for each all-gather.
    on_gloo = dist.get_backend() == "gloo"
    if on_gloo:
        all_gather_in_background(model)  # pyright: ignore[reportArgumentType]
    count = max(parallel.prefetch, int(on_gloo or world.ep_fsdp_mesh is not None))
    first, final = ([end for end in state.ends[model] if isinstance(end, kind)] for kind in (nn.Embedding, nn.Linear))
    order = [unit for unit in (first, *units, final) if unit]
    prefetch_units(model, order, count, world.ep_fsdp_mesh is not None)  # pyright: ignore[reportArgumentType]
    return model


def prefetch_units(model: FSDPModule, units: list[list[nn.Module]], count: int, with_experts: bool) -> None:
    """Makes each FSDP2 unit all-gather the parameters of the next `count` units in advance, in forward and in backward.

    Args:
        model: the root, whose forward is followed by that of the first unit.
        with_experts: whether the experts of a unit are units of their own, which are all-gathered with it.
    """

    def parts(others: list[list[nn.Module]]) -> list[FSDPModule]:
        found = [[other[0], *(_experts(other) if with_experts else [])] for other in others]
        return [part for group in found for part in group]  # pyright: ignore[reportReturnType]

    if not count or not units:
        return
    model.set_modules_to_forward_prefetch(parts(units[:count]))
    for number, unit in enumerate(units):
        before = units[max(0, number - count) : number]
        unit[0].set_modules_to_forward_prefetch(parts(units[number + 1 : number + 1 + count]))
        unit[0].set_modules_to_backward_prefetch(parts(before[::-1]))


def _experts(unit: list[nn.Module]) -> list[nn.Module]:
    return [module for block in unit for module in block.modules() if isinstance(module, Experts)]


def _wrap(
    unit: list[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    *,
    state: ModelState,
    scalars: set[nn.Parameter],
    reshard: bool,
) -> None:
    """Makes the modules of `unit` one FSDP2 unit, whose parameters and gradients are communicated together.

    Args:
        mesh: FSDP2's mesh. Parameters are sharded over its last axis.
        scalars: scalar parameters, which FSDP2 ignores.
        reshard: whether `parallel.reshard_after_forward` applies; if False, parameters are not resharded after forward.
    """
    world, parallel, ranks = state.world, state.plan.parallel, mesh.size(mesh.ndim - 1)
    unsharded = ranks == 1 and parallel.offload != "parameters"
    axes = list(mesh.mesh_dim_names or ())
    if parallel.compress is not None:
        mesh, axes = mesh[axes[-1]], axes[-1:]  # PowerSGD reduces over `dp_replicate`
    gather = None if ranks == 1 else _gather_in_fp8(unit, ranks, state)
    shard_integers()
    fully_shard(
        unit if len(unit) > 1 else unit[0],
        mesh=mesh,
        mp_policy=policy,
        reshard_after_forward=parallel.reshards if reshard and not unsharded else False,
        offload_policy=offload_policy(parallel.offload, world.device),
        shard_placement_fn=partial(shard_dim, ranks),
        ignored_params=scalars,
    )
    for module in unit:
        if world.shape.data_ranks * world.shape.cp > 1:  # else FSDP2 would divide each gradient by 1, in a copy
            module.set_gradient_divide_factor(1.0)  # gradients are summed: the loss is divided by the global weight
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sums
        sizes, note = " x ".join(map(str, mesh.shape)), "" if gather is None else "; gathers weights in 8 bits"
        state.wrappers[module].append(f"FSDP2 ({' x '.join(axes)}: {sizes}{note})")
        if unsharded:
            state.unsharded_units.add(module)
            module.set_custom_reduce_scatter(SingleRankReduceScatter())
    if gather is not None:
        unit[0].set_custom_all_gather(gather)


def _gather_in_fp8(unit: list[nn.Module], ranks: int, state: ModelState) -> AllGatherInFP8 | None:
    """Returns the all-gather of a unit with `fp8: rowwise`; None if it has no such weights. Assumes that units within
    `unit` are already sharded.
    """
    seen: set[nn.Module] = set()
    modules = [module for one in unit for module in _managed_modules(one, seen)]
    own = [p for module in modules for p in module.parameters(recurse=False) if p.ndim]  # FSDP2 ignores scalars
    by_rows = {p: shard_dim(ranks, p) is None for p in own}
    rounded = {p for one in unit for p in weights_of_rows(one) if by_rows.get(p)}
    return AllGatherInFP8(by_rows, rounded, ranks, compile=bool(state.plan.compile)) if rounded else None


def _managed_modules(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yields the modules of a unit in the order of FSDP2's buffers: children first, without units within it."""
    seen.add(module)
    for child in module.children():
        if child not in seen and not isinstance(child, FSDPModule):
            yield from _managed_modules(child, seen)
    yield module


class SingleRankReduceScatter:
    """FSDP2's reduce-scatter for units on a single rank, without a copy.

    FSDP2 allocates an input and an output buffer, and on a single rank copies the input to the output. With this class
    both buffers are the same tensor.
    """

    def __init__(self) -> None:
        self.input: torch.Tensor | None = None

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a new tensor in FSDP2's first call (the input buffer), and the same tensor in the second."""
        buffer, self.input = self.input, None
        if buffer is None or buffer.shape != torch.Size(size) or buffer.dtype != dtype:
            buffer = self.input = torch.empty(size, dtype=dtype, device=device)
        return buffer

    def __call__(self, *arguments, **named) -> None:
        raise RuntimeError("internal error: reduce-scatter was called with a single rank")


def shard_dim(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Returns the placement `Shard(dim)` with which FSDP2 shards a parameter; None means dimension 0.

    FSDP2 pads all shards to the same size. For example, 16 experts sharded over 128 ranks would be padded to eight
    times their size. So if padding of dimension 0 adds more than 10%, the function looks for another dimension that
    `ranks` divides. A dimension other than 0 costs a copy after each all-gather.
    """
    shape = local(parameter).shape
    if not shape or math.ceil(shape[0] / ranks) * ranks <= 1.1 * shape[0]:
        return None
    taken = {p.dim for p in getattr(parameter, "placements", ()) if p.is_shard()}
    others = (dim for dim in range(1, len(shape)) if dim not in taken and shape[dim] % ranks == 0)
    return next((Shard(dim) for dim in others), None)

"""FSDP2 (Zhao et al., 2023): parameters, gradients and optimizer state shared out over `dp_shard` x `cp`."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from weft.errors import UserError
from weft.models.decoder import Decoder
from weft.models.layers.moe import Experts
from weft.parallel.gradients.clip import NothingToScatter
from weft.parallel.local_parameters import distribute_parameters, local, local_part
from weft.parallel.memory.offload import offload_policy
from weft.parallel.model_state import ModelPlan, ModelState, repeated_blocks
from weft.parallel.world import World
from weft.torch_private import dtensor_like


def replicate_scalars(model: nn.Module, state: ModelState) -> nn.Module:
    """Make parameters without dimensions DTensors that every rank holds: FSDP2 shards none, and is told to ignore them.

    Assumes that `tp` and `ep` have left them plain. `MeshParameters` casts them and sums their gradients.
    """
    mesh = state.world.fsdp
    everywhere = [Replicate()] * mesh.ndim
    distribute_parameters(model, mesh, lambda _, __, parameter: None if parameter.ndim else everywhere)
    return model


class MeshParameters:
    """Gives a DTensor parameter's plain tensor on this rank.

    FSDP2 casts them and reduces their gradients, but for those of scalars: these are all-reduced in every backward.
    """

    def __init__(self, plan: ModelPlan, world: World):
        axes = ["dp_shard", "cp", "tp"] if plan.parallel.compress else ["dp_replicate", "dp_shard", "cp", "tp"]
        self.groups = [world.group(axis) for axis in axes if world.shape.sizes[axis] > 1]
        self.dtype, self.state_dtype, self.device = plan.dtype, plan.state_dtype, world.device

    def __call__(self, parameter: DTensor) -> torch.Tensor:
        return local_part(parameter) if parameter.ndim else _Scalar.apply(parameter, self)


class _Scalar(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter, of):
        ctx.parameter, ctx.of = parameter, of
        return local(parameter).to(of.device, of.dtype, copy=True)

    @staticmethod
    def backward(ctx, grad):
        total = grad.to(ctx.of.state_dtype, copy=True)
        for group in ctx.of.groups:
            dist.all_reduce(total, group=group)
        return dtensor_like(total.to(ctx.parameter.device), ctx.parameter), None


def shard_over_data(model: nn.Module, state: ModelState) -> nn.Module:
    """Wraps units of `layers_per_fsdp_unit` blocks, and the rest, by FSDP2 with its mixed-precision policy.

    Assumes that all other transformations are done: what they put around forwards stays inside of FSDP2's hooks.
    Leaves every parameter but scalars a DTensor that is sharded over `dp_shard` x `cp`, and gradients that are sums
    over ranks.
    """
    world, parallel, blocks = state.world, state.plan.parallel, repeated_blocks(model)
    policy = MixedPrecisionPolicy(
        param_dtype=state.plan.dtype,
        reduce_dtype=state.plan.reduce_dtype or state.plan.state_dtype,
        output_dtype=state.plan.state_dtype,
        cast_forward_inputs=False,
    )
    # Only the decoder's residual stream is wide: layers of others want it in their weights' dtype, experts too.
    narrow = replace(policy, output_dtype=None)
    inner = policy if isinstance(model, Decoder) else narrow
    units = [
        blocks[first : first + parallel.layers_per_fsdp_unit]
        for first in range(0, len(blocks), parallel.layers_per_fsdp_unit)
    ]
    # Backward begins with the rest and the last unit: freeing them before it would be for nothing.
    last = {module for block in units[-1] for module in block.modules()} if units else set()
    scalars = {parameter for parameter in model.parameters() if not parameter.ndim}
    wrap = partial(_wrap, state=state, scalars=scalars)
    if world.experts_fsdp is not None:
        for module in model.modules():
            if isinstance(module, Experts):
                wrap([module], world.experts_fsdp, narrow, reshard=module not in last)
    for unit in units:
        wrap(unit, world.fsdp, inner, reshard=unit[0] not in last)
    wrap([model], world.fsdp, policy, reshard=False)
    for number, unit in enumerate(units if parallel.prefetch else []):
        ahead = units[number + 1 : number + 1 + parallel.prefetch]
        before = units[max(0, number - parallel.prefetch) : number]
        unit[0].set_modules_to_forward_prefetch([one[0] for one in ahead])
        unit[0].set_modules_to_backward_prefetch([one[0] for one in reversed(before)])
    return model


def _wrap(
    unit: list[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    *,
    state: ModelState,
    scalars: set[nn.Parameter],
    reshard: bool,
) -> None:
    """Make modules one unit of FSDP2: their parameters are gathered, and their gradients reduced, together."""
    world, parallel, ranks = state.world, state.plan.parallel, mesh.size(mesh.ndim - 1)
    keep = ranks == 1 and parallel.offload != "parameters"  # nothing is shared, so there is nothing to free
    axes = list(mesh.mesh_dim_names or ())
    if parallel.compress is not None:
        mesh, axes = mesh[axes[-1]], axes[-1:]  # gradients are summed inside of each copy: `compress.py` does the rest
    fully_shard(
        unit if len(unit) > 1 else unit[0],
        mesh=mesh,
        mp_policy=policy,
        reshard_after_forward=parallel.reshards if reshard and not keep else False,
        offload_policy=offload_policy(parallel.offload, world.device),
        shard_placement_fn=partial(dimension, ranks),
        ignored_params=scalars,
    )
    for module in unit:
        if world.shape.data_ranks * world.shape.cp > 1:  # else FSDP2 would divide each gradient by 1, in a copy of it
            module.set_gradient_divide_factor(1.0)  # gradients are summed: the loss is divided by the global weight
        module.set_force_sum_reduction_for_comms(True)  # by plain sums: gloo has no pre-multiplied ones
        state.wrappers[module].append(f"FSDP2 ({' x '.join(axes)}: {' x '.join(map(str, mesh.shape))})")
        if keep:
            state.unsharded_units.add(module)
            module.set_custom_reduce_scatter(NothingToScatter())


def raise_if_shared(model: nn.Module, blocks: list[nn.Module]) -> None:
    """FSDP2 cannot gather one parameter with two blocks. Raises UserError, naming it."""
    seen: dict[int, nn.Module] = {}
    for block in blocks:
        for name, parameter in block.named_parameters():
            if seen.setdefault(id(parameter), block) is not block:
                raise UserError(
                    f"model: {type(model).__name__}: several layers share one {name}, and layers are sharded one by "
                    "one; a model with shared layers cannot be trained here"
                )


def dimension(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """The dimension that a parameter is cut along; None: the first.

    Each rank's cut has room for as many rows as any: 16 experts over 128 ranks would take, and send, eight times what
    they are. So where more than a tenth of the first dimension's cuts were for nothing, another is cut, if one divides
    evenly, which costs a copy of what is gathered.
    """
    here = local(parameter).shape
    if not here or math.ceil(here[0] / ranks) * ranks <= 1.1 * here[0]:
        return None
    taken = {p.dim for p in getattr(parameter, "placements", ()) if p.is_shard()}
    others = (dim for dim in range(1, len(here)) if dim not in taken and here[dim] % ranks == 0)
    return next((Shard(dim) for dim in others), None)

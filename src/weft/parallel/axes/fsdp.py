"""FSDP2 (Zhao et al., 2023): parameters, gradients and optimizer state shared out over `dp_shard` x `cp`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from weft.config.mesh import ParallelSection
from weft.models.decoder import Decoder
from weft.models.layers.experts import Experts
from weft.parallel.gradients.clip import NothingToScatter
from weft.parallel.memory.offload import offload_policy
from weft.parallel.parts import local
from weft.parallel.world import World


def shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    parallel: ParallelSection,
    world: World,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Wrap units of `layers_per_unit` blocks, and the rest; a mesh of one keeps its parameters.

    Args:
        dtype: of computing.
        reduce_dtype: of the sums of gradients; default: float32, float64 for float64.
    """
    wide = torch.promote_types(dtype, torch.float32)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=reduce_dtype or wide, output_dtype=wide, cast_forward_inputs=False
    )
    # Only the decoder's residual stream is wide: layers of others want it in their weights' dtype, experts too.
    narrow = replace(policy, output_dtype=None)
    inner = policy if isinstance(model, Decoder) else narrow
    units = [
        list(blocks[first : first + parallel.layers_per_unit])
        for first in range(0, len(blocks), parallel.layers_per_unit)
    ]
    # Backward begins with the rest and the last unit: freeing them before it would be for nothing.
    last = {module for block in units[-1] for module in block.modules()} if units else set()
    if world.experts_fsdp is not None:
        for module in model.modules():
            if isinstance(module, Experts):
                size = world.shape.fsdp // world.shape.ep
                _wrap(module, parallel, world, world.experts_fsdp, narrow, size, reshard=module not in last)
    for unit in units:
        one = unit if len(unit) > 1 else unit[0]
        _wrap(one, parallel, world, world.fsdp, inner, world.shape.fsdp, reshard=unit[0] not in last)
    _wrap(model, parallel, world, world.fsdp, policy, world.shape.fsdp, reshard=False)
    for number, unit in enumerate(units if parallel.prefetch else []):
        ahead = units[number + 1 : number + 1 + parallel.prefetch]
        before = units[max(0, number - parallel.prefetch) : number]
        unit[0].set_modules_to_forward_prefetch([one[0] for one in ahead])
        unit[0].set_modules_to_backward_prefetch([one[0] for one in reversed(before)])


def _wrap(unit, parallel, world, mesh, policy, ranks, reshard: bool = True) -> None:
    keep = ranks == 1 and parallel.offload != "parameters"  # nothing is shared, so there is nothing to free
    after = parallel.reshards if reshard and not keep else False
    if parallel.compress is not None:
        mesh = mesh[mesh.mesh_dim_names[-1]]  # gradients are summed inside of each copy: `compress.py` does the rest
    host = offload_policy(parallel.offload, world.device)
    fully_shard(
        unit,
        mesh=mesh,
        mp_policy=policy,
        reshard_after_forward=after,
        offload_policy=host,
        shard_placement_fn=partial(dimension, ranks),
    )
    for module in unit if isinstance(unit, list) else [unit]:
        if world.shape.data_ranks * world.shape.cp > 1:  # alone, FSDP2 would divide each gradient by 1, in a copy of it
            module.set_gradient_divide_factor(1.0)  # gradients are summed: the loss is divided by the global weight
        module.set_force_sum_reduction_for_comms(True)  # by plain sums: gloo has no pre-multiplied ones
        module.weft_keeps_parameters = keep
        if keep:
            module.set_custom_reduce_scatter(NothingToScatter())


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


def on_last_micro_batch(model: nn.Module, last: bool, parallel: ParallelSection | None = None) -> None:
    """Say before each backward whether it is the step's last: gradients are summed over the ranks once a step.

    Or, if that is set, with every micro-batch, over the ranks that share a copy of the model; copies add up their sums
    with the last one. Where nothing is sharded, or gathered parameters are kept until backward anyway, they are also
    kept from one micro-batch to the next.
    """
    if not isinstance(model, FSDPModule):
        return  # one process alone
    model.set_requires_gradient_sync(last or (parallel is not None and parallel.reduces_every))
    model.set_requires_all_reduce(last)
    model.set_is_last_backward(last)
    kept = parallel is not None and parallel.reshards is False
    for module in model.modules():
        if isinstance(module, FSDPModule) and (module.weft_keeps_parameters or kept):
            module.set_reshard_after_backward(last, recurse=False)

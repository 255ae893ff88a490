"""Gathers a sharded model into a full (unsharded) model on rank 0."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft.config.model import CustomModelSection, ModelSection
from weft.models.adapter import add_adapter
from weft.models.build import build_model
from weft.models.initialize import initialize_buffers
from weft.parallel.model_state import state_of
from weft.parallel.world import World


@torch.no_grad()
def gather_full_model(
    model: nn.Module, section: ModelSection | CustomModelSection, world: World, dtype: torch.dtype
) -> nn.Module | None:
    """Gathers a sharded model, one tensor at a time. Every rank must call this function.

    Returns:
        On rank 0, a copy of the full model in `dtype` on this rank's device, which must have enough memory. On other
        ranks None.
    """
    full, state = None, state_of(model)
    if world.rank == 0:
        built_in = isinstance(section, ModelSection)
        with torch.device("meta" if built_in else world.device):
            full = build_model(section).to(dtype)
            if state is not None and state.plan.adapter is not None:
                add_adapter(full, state.plan.adapter)
        if built_in:
            full.to_empty(device=world.device)
            initialize_buffers(full)
    own_stage, tensors = world.axis_rank("pp"), model.state_dict(keep_vars=True)
    names: list[list[str]] = [list(tensors)]
    if world.pp_group is not None:
        names = [[] for _ in range(world.shape.pp)]
        dist.all_gather_object(names, list(tensors), group=world.pp_group)
    targets = {} if full is None else full.state_dict(keep_vars=True)
    sends = world.data_rank == world.axis_rank("cp") == world.axis_rank("tp") == 0
    for stage, stage_names in enumerate(names):
        for name in stage_names:
            value = None
            if stage == own_stage:
                value = tensors[name].detach()
                value = value.full_tensor() if isinstance(value, DTensor) else value
                value = value.to(dtype) if value.is_floating_point() else value
            if stage and sends and value is not None:
                dist.send(value.contiguous(), group=world.pp_group, group_dst=0)
            elif stage and world.rank == 0:
                value = torch.empty_like(targets[name])
                dist.recv(value, group=world.pp_group, group_src=stage)
            if world.rank == 0:
                targets[name].copy_(value)
    return full

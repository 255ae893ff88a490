"""A whole model on the first rank, out of the parts that all ranks have."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft.config.model import CustomModelSection, ModelSection
from weft.models.build import build_model
from weft.models.initialize import initialize_buffers
from weft.parallel.world import World


@torch.no_grad()
def whole_model(
    model: nn.Module, section: ModelSection | CustomModelSection, world: World, dtype: torch.dtype
) -> nn.Module | None:
    """A copy of the model that needs no other rank, one tensor after another. Every rank calls it.

    Args:
        dtype: of the copy.

    Returns:
        On the first rank the copy, on its device, which must have room for it; None on the others.
    """
    whole = None
    if world.rank == 0:
        built_in = isinstance(section, ModelSection)
        with torch.device("meta" if built_in else world.device):
            whole = build_model(section).to(dtype)
        if built_in:
            whole.to_empty(device=world.device)
            initialize_buffers(whole)
    mine, tensors = world.place("pp"), model.state_dict(keep_vars=True)
    names: list[list[str]] = [list(tensors)]
    if world.stages is not None:
        names = [[] for _ in range(world.shape.pp)]
        dist.all_gather_object(names, list(tensors), group=world.stages)
    targets = {} if whole is None else whole.state_dict(keep_vars=True)
    first_of_stage = world.data_rank == world.place("cp") == world.place("tp") == 0
    for stage, theirs in enumerate(names):
        for name in theirs:
            value = None
            if stage == mine:
                value = tensors[name].detach()
                value = (value.full_tensor() if isinstance(value, DTensor) else value).to(dtype)
            if stage and first_of_stage and value is not None:
                dist.send(value.contiguous(), group=world.stages, group_dst=0)
            elif stage and world.rank == 0:
                value = torch.empty_like(targets[name])
                dist.recv(value, group=world.stages, group_src=stage)
            if world.rank == 0:
                targets[name].copy_(value)
    return whole

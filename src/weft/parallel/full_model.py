"""Gathers a sharded model into full (unsharded) models."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft.config.model import CustomModelSection, ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.models.adapter import add_adapter
from weft.models.build import build_model
from weft.models.initialize import initialize_buffers
from weft.parallel.model_state import state_of
from weft.parallel.world import World


def gather_full_model(
    model: nn.Module, section: ModelSection | CustomModelSection, world: World, dtype: torch.dtype
) -> nn.Module | None:
    """Gathers a sharded model, one tensor at a time. Every rank must call this function.

    Returns:
        On rank 0, a copy of the full model in `dtype` on this rank's device, which must have enough memory. On other
        ranks None.
    """
    full = new_full_model(model, section, world.device, dtype) if world.rank == 0 else None
    gather_weights(model, full, world, dtype)
    return full


def new_full_model(
    model: nn.Module,
    section: ModelSection | TransformersModelSection | CustomModelSection,
    device: torch.device,
    dtype: torch.dtype,
) -> nn.Module:
    """Returns an unsharded model like `model`, with its adapter, in `dtype` on `device`. Its weights are not set."""
    built_in, hf = isinstance(section, ModelSection), isinstance(section, TransformersModelSection)
    with torch.device("meta" if built_in else "cpu" if hf else device):
        full = build_model(section).to(dtype)
        state = state_of(model)
        if state is not None and state.plan.adapter is not None:
            add_adapter(full, state.plan.adapter)
    if built_in:
        full.to_empty(device=device)
        initialize_buffers(full)
    elif hf:
        from weft.models.transformers_model import materialize

        materialize(full, device)
        full.set_compute_dtype(dtype)  # pyright: ignore[reportCallIssue]
    return full


@torch.no_grad()
def gather_weights(
    model: nn.Module,
    full: nn.Module | None,
    world: World,
    dtype: torch.dtype,
    *,
    everywhere: bool = False,
    select: Callable[[str], bool] | None = None,
) -> None:
    """Copies the weights of a sharded model to a full model, one tensor at a time. Every rank must call this function.

    Args:
        full: result of `new_full_model` in `dtype`: on rank 0, or with `everywhere` on every rank; otherwise None.
        select: function that returns whether a tensor is copied, given its name. Default: all are.
    """
    own_stage, tensors = world.axis_rank("pp"), model.state_dict(keep_vars=True)
    names: list[list[str]] = [list(tensors)]
    if world.pp_group is not None:
        names = [[] for _ in range(world.shape.pp)]
        dist.all_gather_object(names, list(tensors), group=world.pp_group)
    targets = {} if full is None else full.state_dict(keep_vars=True)
    sends = world.data_rank == world.axis_rank("cp") == world.axis_rank("tp") == 0
    for stage, stage_names in enumerate(names):
        for name in filter(select, stage_names) if select is not None else stage_names:
            value = None
            if stage == own_stage:
                value = tensors[name].detach()
                value = value.full_tensor() if isinstance(value, DTensor) else value
                value = (value.to(dtype) if value.is_floating_point() else value).contiguous()
            if everywhere and world.pp_group is not None:
                value = torch.empty_like(targets[name]) if value is None else value
                dist.broadcast(value, group=world.pp_group, group_src=stage)
            elif stage and sends and value is not None:
                dist.send(value, group=world.pp_group, group_dst=0)
            elif stage and world.rank == 0:
                value = torch.empty_like(targets[name])
                dist.recv(value, group=world.pp_group, group_src=stage)
            if name in targets:
                assert value is not None
                targets[name].copy_(value)

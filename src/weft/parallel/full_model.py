"""Gathers a sharded model into full (unsharded) models.

An adapter (LoRA, DoRA, PiSSA) is merged into the weights of a full model, which then computes as fast as a model
without an adapter. If the base model is quantized, the full model has the codes and the adapter instead, because merged
weights would need two to four times the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft.config.adapter import AdapterSection
from weft.config.model import CustomModelSection, ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.models.adapter import add_adapter, is_adapter
from weft.models.build import build_model
from weft.models.initialize import initialize_buffers
from weft.models.low_rank import LowRank
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
    """Returns an unsharded model like `model`, in `dtype` on `device`. Its weights are not set.

    The model has the adapter of `model` only if the adapter's base is quantized (see `merges_adapter`).
    """
    built_in, hf = isinstance(section, ModelSection), isinstance(section, TransformersModelSection)
    with torch.device("meta" if built_in else "cpu" if hf else device):
        full = build_model(section).to(dtype)
        adapter = _adapter_of(model)
        if adapter is not None and not merges_adapter(adapter):
            add_adapter(full, adapter)
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

    An adapter that `new_full_model` has left out is merged: W + s B A is computed in at least float32 from the current
    tensors of `model`, then rounded to `dtype`. No earlier sum is changed, so errors do not accumulate.

    Args:
        full: result of `new_full_model` in `dtype`: on rank 0, or with `everywhere` on every rank; otherwise None.
        select: function that returns whether a tensor is copied, given its name. Default: all are.
    """
    own_stage, tensors = world.axis_rank("pp"), model.state_dict(keep_vars=True)
    adapter = _adapter_of(model)
    merged = adapter if adapter is not None and merges_adapter(adapter) else None
    names: list[list[str]] = [[name for name in tensors if merged is None or not is_adapter(name)]]
    if world.pp_group is not None:
        mine, names = names[0], [[] for _ in range(world.shape.pp)]
        dist.all_gather_object(names, mine, group=world.pp_group)
    targets = {} if full is None else full.state_dict(keep_vars=True)
    sends = world.data_rank == world.axis_rank("cp") == world.axis_rank("tp") == 0
    for stage, stage_names in enumerate(names):
        for name in filter(select, stage_names) if select is not None else stage_names:
            value = None
            if stage == own_stage:
                value = _full(tensors[name])
                if merged is not None:
                    value = _merged(name, value, tensors, merged)
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


def merges_adapter(section: AdapterSection) -> bool:
    """Whether full models have the adapter merged into their weights: unless its base model is quantized."""
    return section.quantize is None


def _adapter_of(model: nn.Module) -> AdapterSection | None:
    """Returns the adapter section of a sharded model; None without an adapter."""
    state = state_of(model)
    return None if state is None else state.plan.adapter


def _merged(
    name: str, weight: torch.Tensor, tensors: Mapping[str, torch.Tensor], section: AdapterSection
) -> torch.Tensor:
    """Returns the full weight `name` with its change by the adapter in `tensors`, if the adapter changes it.

    All ranks that have the sharded tensors must call it.
    """
    layer = name.removesuffix(".weight")
    separator = "_" if layer == name else "."  # stacked experts have `up_proj_lora_a` beside `up_proj`
    low_rank = {kind: tensors.get(f"{layer}{separator}{kind}") for kind in ("lora_a", "lora_b", "lora_magnitude")}
    a, b, magnitude = (None if one is None else _full(one) for one in low_rank.values())
    return weight if a is None or b is None else LowRank(a, b, section.scale, magnitude).merged(weight)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the full tensor. All ranks of the tensor's mesh must call this function."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

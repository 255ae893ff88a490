"""Makes the parameters of a module DTensors: distributes values, or creates those on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from weft.planner.parallelize.torch_private import initializer_of, parameters_of, refresh_flat_weights, was_written

# name and shape of a parameter -> mesh and placements
Stored = Callable[[str, Sequence[int]], tuple[DeviceMesh, list[Placement]]]
Values = Mapping[str, torch.Tensor]


def materialize(model: nn.Module, device: str, stored: Stored, state_dict: Values | None) -> None:
    """Replaces the parameters of a module by DTensors, in place. Tied parameters stay tied.

    Values come from `state_dict`, or else from the module. Parameters and buffers on the meta device get initial
    values: by `reset_parameters()` of their module, or by `_init_weights(module)` of the model (Transformers). One
    module at a time has full tensors, on all ranks. With None as `state_dict`, all tensors stay where they are.

    Raises:
        ValueError: a tensor on the meta device gets no value.
    """
    made: dict[torch.Tensor, nn.Parameter] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        old = dict(parameters_of(module))
        if state_dict is not None:
            _fill(model, module, prefix, device, state_dict, made)
        own = parameters_of(module)
        for name, parameter in old.items():
            if parameter is None:
                continue
            if parameter not in made:
                value = distribute(own[name].detach(), *stored(prefix + name, parameter.shape))
                made[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            own[name] = made[parameter]
        if own:
            refresh_flat_weights(module)
            module.register_load_state_dict_pre_hook(_distribute_loaded)


def distribute(value: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Returns a DTensor of a full tensor that all ranks have; this rank's shard has memory of its own."""
    sharded = distribute_tensor(value, mesh, placements, src_data_rank=None)
    local = sharded.to_local().clone(memory_format=torch.contiguous_format)
    stride = torch.empty(value.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=stride)


def _fill(
    model: nn.Module, module: nn.Module, prefix: str, device: str, values: Values, made: Mapping[torch.Tensor, Any]
) -> None:
    """Gives a module's own parameters and buffers their values, as full tensors on the device."""
    parameters = {name: one for name, one in module.named_parameters(recurse=False) if one not in made}
    own: dict[str, torch.Tensor] = {**parameters, **dict(module.named_buffers(recurse=False))}
    new: list[str] = []
    for name, old in own.items():
        if prefix + name in values:
            value = values[prefix + name].detach().to(device=device, dtype=old.dtype, copy=True)
        elif old.is_meta:
            value = torch.empty(old.shape, dtype=old.dtype, device=device)
            new.append(name)
        else:
            value = old.detach().to(device)
        if name in parameters:
            parameters_of(module)[name] = nn.Parameter(value, requires_grad=old.requires_grad)
        elif value.device != old.device or (value is not old and prefix + name in values):
            setattr(module, name, value)
    if not new:
        return
    refresh_flat_weights(module)
    before = {name: getattr(module, name) for name in new}
    reset = initializer_of(model, module)
    if reset is not None:
        with torch.no_grad():
            reset()
    empty = [
        f"{prefix}{name}" for name in new if not was_written(before[name]) and getattr(module, name) is before[name]
    ]
    if empty:
        raise ValueError(
            f"{', '.join(empty)}: on the meta device, and {type(module).__name__} has no reset_parameters() that sets "
            "one; give apply a state_dict, or a module on the CPU"
        )


def _distribute_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Shards full tensors of a state dict before the module loads them."""
    for name, parameter in module.named_parameters(recurse=False):
        value = state_dict.get(prefix + name)
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
            continue
        if value.shape == parameter.shape:
            new = distribute(value.detach(), parameter.device_mesh, parameter.placements)
            state_dict[prefix + name] = new

"""Creates DTensor parameters, and makes forward passes use the local shards of these parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor

from weft.models.initialize import Part
from weft.torch_private import compute_local_shape_and_global_offset, parameters_of, silence_redistribution

if TYPE_CHECKING:
    from weft.parallel.model_state import ModelState


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of a tensor, as a detached tensor that shares the shard's memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if not torch.is_grad_enabled():
        return tensor.to_local()
    with torch.no_grad():  # detaching a DTensor takes eight times as long
        return tensor.to_local()


def local_with_grad(parameter: DTensor) -> torch.Tensor:
    """Returns this rank's shard. The shard's gradient is partial over mesh axes that replicate the parameter."""
    placements = [p if isinstance(p, Shard) else Partial() for p in parameter.placements]
    return parameter.to_local(grad_placements=placements)


def distribute_parameters(
    model: nn.Module,
    mesh: DeviceMesh,
    placements_of: Callable[[nn.Module, str, nn.Parameter], Sequence[Placement] | None],
) -> None:
    """Replaces parameters with DTensors on a mesh.

    Parameters that are not on the meta device must be equal on all ranks.

    Args:
        placements_of: (module, full parameter name, parameter) -> placements of the parameter, or None to keep the
            plain parameter.
    """
    silence_redistribution()
    replaced: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in replaced:
                placements = placements_of(module, f"{path}.{name}".lstrip("."), parameter)
                if placements is None:
                    continue
                sharded = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
                replaced[parameter] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
            setattr(module, name, replaced[parameter])


def shard_part(parameter: torch.Tensor) -> Part:
    """Returns which part of the full parameter this rank has. It is empty if there are fewer rows than ranks."""
    if not isinstance(parameter, DTensor):
        return Part([0] * parameter.dim(), parameter.shape)
    size, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return Part(start, size)


@torch.no_grad()
def set_full_value(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a full (unsharded) value, which every rank has, to a parameter that can be sharded."""
    if isinstance(parameter, DTensor):
        # src_data_rank=None: every rank has the same full tensor, so nothing is sent.
        value = distribute_tensor(
            value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(value)


class LocalParameters:
    """Replaces the DTensor parameters of an FSDP2 unit with this rank's plain tensors during forward passes.

    Args:
        unit: module whose parameters FSDP2 gathers when the module's forward is called.
        nested_units: FSDP2 units inside of `unit`, whose parameters are not replaced.
    """

    def __init__(self, unit: nn.Module, nested_units: Collection[nn.Module], state: ModelState):
        nested = {module for other in nested_units for module in other.modules()}
        self.local = state.local
        self.slots = [
            (parameters_of(module), name, state.scales.get((module, name)))
            for module in unit.modules()
            if module not in nested
            for name, parameter in module.named_parameters(recurse=False)
            if isinstance(parameter, DTensor)
        ]

    def wrap(self, forward: Callable) -> Callable:
        """Returns a function that calls `forward` while plain tensors replace the DTensor parameters."""
        slots, local = self.slots, self.local

        @wraps(forward)
        def call(*arguments: Any, **named: Any) -> Any:
            saved = [parameters[name] for parameters, name, _ in slots]
            try:
                for (parameters, name, scale), parameter in zip(slots, saved, strict=True):
                    tensor = local(parameter)
                    parameters[name] = tensor if scale is None else tensor * scale
                return forward(*arguments, **named)
            finally:
                for (parameters, name, _), parameter in zip(slots, saved, strict=True):
                    parameters[name] = parameter

        return call if slots else forward

"""What a rank holds of a model's parameters, and how forwards come to compute with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor

from weft.torch_private import parameters_of, silence_redistribution

if TYPE_CHECKING:
    from weft.parallel.model_state import ModelState


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing its memory, and without a gradient's history."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():  # detaching a DTensor takes eight times as long
        return tensor.to_local()


def local_part(parameter: DTensor) -> torch.Tensor:
    """This rank's part. Its gradient is one summand of it, over dimensions of the mesh that do not cut it."""
    placements = [p if isinstance(p, Shard) else Partial() for p in parameter.placements]
    return parameter.to_local(grad_placements=placements)


def distribute_parameters(
    model: nn.Module,
    mesh: DeviceMesh,
    placements_of: Callable[[nn.Module, str, nn.Parameter], Sequence[Placement] | None],
) -> None:
    """Make parameters DTensors on a mesh. All ranks have the same values, if they have any.

    Args:
        placements_of: (module, the parameter's name in the model, parameter) -> its placements; None: leave it.
    """
    silence_redistribution()
    replaced: dict[nn.Parameter, nn.Parameter] = {}  # a tied one stays one
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in replaced:
                placements = placements_of(module, f"{path}.{name}".lstrip("."), parameter)
                if placements is None:
                    continue
                part = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
                replaced[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
            setattr(module, name, replaced[parameter])


class LocalParameters:
    """This rank's plain tensors, in the place of all DTensors that are parameters of a unit, while its forward runs.

    Args:
        unit: one of FSDP2's, whose parameters are gathered when its forward is called.
        apart: modules inside it that are units of their own.
    """

    def __init__(self, unit: nn.Module, apart: Collection[nn.Module], state: ModelState):
        others = {module for one in apart for module in one.modules()}
        self.local = state.local
        self.places = [
            (parameters_of(module), name, state.shares.get((module, name)))
            for module in unit.modules()
            if module not in others
            for name, parameter in module.named_parameters(recurse=False)
            if isinstance(parameter, DTensor)
        ]

    def around(self, forward: Callable) -> Callable:
        """`forward`, which finds the plain tensors."""
        places, local = self.places, self.local

        @wraps(forward)
        def call(*arguments: Any, **named: Any) -> Any:
            before = [parameters[name] for parameters, name, _ in places]
            try:
                for (parameters, name, share), parameter in zip(places, before, strict=True):
                    part = local(parameter)
                    parameters[name] = part if share is None else part * share
                return forward(*arguments, **named)
            finally:
                for (parameters, name, _), parameter in zip(places, before, strict=True):
                    parameters[name] = parameter

        return call if places else forward

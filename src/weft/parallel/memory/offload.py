"""Offloading to host memory (`parallel.offload`).

`parameters`: FSDP2 copies each unit's parameters to the device when it gathers them, and copies gradients back to the
host. Optimizer state is on the host, and updates are computed there. `optimizer`: only optimizer state is on the host.
An update copies the state of a few parameters at a time to the device, where the update is computed. So AdamW's results
are bitwise equal to results without offloading. (ZeRO-Offload, Ren et al., 2021, computes the update on the host.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from weft.parallel.local_parameters import local
from weft.torch_private import tree_map_only

HOST = torch.device("cpu")
_CHUNK = 128 << 20  # bytes of parameters per update call; AdamW's state is twice as large


def offload_policy(offload: str, device: torch.device) -> OffloadPolicy:
    """Returns FSDP2's offload policy for a value of `parallel.offload`."""
    if offload != "parameters":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device.type != "cpu")


def parameter_device(offload: str, device: torch.device) -> torch.device:
    """Returns the device on which parameters are stored: the host if `offload` is "parameters", otherwise `device`."""
    return HOST if offload == "parameters" else device


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Moves all buffers to `device`, because FSDP2 offloads only parameters."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def keep_state_on_host(optimizer: torch.optim.Optimizer, device: torch.device, chunk: int = _CHUNK) -> None:
    """Makes an optimizer keep its state on the host between steps.

    The update of each parameter must depend only on the parameter, its gradient and its optimizer state, as in AdamW
    and Muon. Then results do not change, except for the last bits of values that an optimizer computes for several
    parameters together (Muon's matrix products). Sets `state_on_host` in the optimizer's parameter groups, which
    checkpoint loading reads.

    Args:
        device: device of the parameters.
        chunk: bytes of parameters per rank that are updated together. Only the state of these parameters is on the
            device at that time.
    """
    for group in optimizer.param_groups:
        group["state_on_host"] = True
    optimizer.step = functools.partial(_step_in_chunks, optimizer, optimizer.step, device, chunk)  # type: ignore


def _step_in_chunks(
    optimizer: torch.optim.Optimizer, step: Callable[[], Any], device: torch.device, chunk: int
) -> None:
    groups = optimizer.param_groups
    try:
        for group, parameters in list(_chunks(groups, chunk)):
            states = {p: optimizer.state[p] for p in parameters if p in optimizer.state}
            for parameter, state in states.items():
                optimizer.state[parameter] = _to_device(state, device)
            optimizer.param_groups = [{**group, "params": parameters}]
            step()
            for parameter in parameters:
                if parameter in optimizer.state:
                    optimizer.state[parameter] = _to_host(optimizer.state[parameter], states.get(parameter, {}))
    finally:
        optimizer.param_groups = groups
    if device.type != "cpu":  # wait for asynchronous copies
        torch.get_device_module(device).current_stream(device).synchronize()


def _chunks(groups: list[dict[str, Any]], chunk: int) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
    """Splits each parameter group into sets of parameters to update together. Yields (parameter group, set).

    A set has at most `chunk` bytes per rank, except for a single larger parameter. All ranks yield the same
    sets of parameters, because an optimizer can communicate.
    """
    for group in groups:
        parameters, total = [], 0
        for parameter in group["params"]:
            ranks = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
            size = parameter.numel() * parameter.element_size() // ranks
            if parameters and total + size > chunk:
                yield group, parameters
                parameters, total = [], 0
            parameters.append(parameter)
            total += size
        if parameters:
            yield group, parameters


def _to_device(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Copies the state of a parameter to `device`, except for scalars such as step counts."""
    return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True) if x.dim() else x, state)


def _to_host(state: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Copies the state of a parameter to the host.

    Args:
        before: earlier state on the host. Its pinned tensors are reused if shape and dtype match.
    """

    def copy(value: Tensor, old: Any) -> Tensor:
        if not value.dim() or value.device == HOST:
            return value
        fits = isinstance(old, Tensor) and old.shape == value.shape and old.dtype == value.dtype
        if not (fits and local(old).is_pinned()):
            old = torch.empty_like(value, device=HOST, pin_memory=True)
        return old.copy_(value, non_blocking=True)

    def copy_nested(value: Tensor) -> Tensor:
        return value.to(HOST) if value.dim() else value

    return {
        key: copy(value, before.get(key)) if isinstance(value, Tensor) else tree_map_only(Tensor, copy_nested, value)
        for key, value in state.items()
    }

"""What a step needs only for a moment lives in the host's memory in between (`parallel.offload`).

`parameters`: FSDP2 brings each unit's parameters to the device when it gathers them, and takes gradients back: so the
optimizer's state is on the host, too, and updates are computed there. `optimizer`: its state alone, which visits the
device for the update, a few parameters' at a time (Ren et al., "ZeRO-Offload", 2021, update on the host: that is as
much to move, and other bits).
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
_PIECE = 128 << 20  # bytes of parameters that are updated at a time; AdamW's state is twice as much


def offload_policy(offload: str, device: torch.device) -> OffloadPolicy:
    """What FSDP2 is told."""
    if offload != "parameters":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device.type != "cpu")


def home(offload: str, device: torch.device) -> torch.device:
    """Where parameters live."""
    return HOST if offload == "parameters" else device


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Have buffers on `device`, wherever parameters are: FSDP2 brings only those."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def keep_state_on_host(optimizer: torch.optim.Optimizer, device: torch.device, piece: int = _PIECE) -> None:
    """Have an optimizer leave its state on the host after each `step`.

    Each parameter's update must depend on that parameter, its gradient and state alone, as in AdamW and Muon. Then
    they are the same numbers, up to the last bits of what an optimizer computes for several parameters at once (Muon's
    products). Its class, groups and state, and so checkpoints, are what they were; `state_on_host` is added to its
    groups, where loading a checkpoint looks for it.

    Args:
        device: where parameters are.
        piece: bytes of parameters, on each rank, whose state is on the device at a time.
    """
    for group in optimizer.param_groups:
        group["state_on_host"] = True
    optimizer.step = functools.partial(_step_in_pieces, optimizer, optimizer.step, device, piece)  # type: ignore


def _step_in_pieces(
    optimizer: torch.optim.Optimizer, step: Callable[[], Any], device: torch.device, piece: int
) -> None:
    groups = optimizer.param_groups
    try:
        for group, parameters in list(_pieces(groups, piece)):
            states = {p: optimizer.state[p] for p in parameters if p in optimizer.state}
            for parameter, state in states.items():
                optimizer.state[parameter] = _moved(state, device)
            part = {**group, "params": parameters}
            optimizer.param_groups = [part]
            step()
            for parameter in parameters:
                if parameter in optimizer.state:
                    optimizer.state[parameter] = _back(optimizer.state[parameter], states.get(parameter, {}))
    finally:
        optimizer.param_groups = groups
    if device.type != "cpu":  # what is copied without waiting is read next
        torch.get_device_module(device).current_stream(device).synchronize()


def _pieces(groups: list[dict[str, Any]], piece: int) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
    """Parameters of one group that are updated together: the same on every rank, since an optimizer may gather them."""
    for group in groups:
        parameters, size = [], 0
        for parameter in group["params"]:
            ranks = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
            own = parameter.numel() * parameter.element_size() // ranks
            if parameters and size + own > piece:
                yield group, parameters
                parameters, size = [], 0
            parameters.append(parameter)
            size += own
        if parameters:
            yield group, parameters


def _moved(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Single numbers, as counts of steps, stay where they are."""
    return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True) if x.dim() else x, state)


def _back(state: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """To the host, into the memory that was theirs."""

    def back(value: Tensor, old: Any) -> Tensor:
        if not value.dim() or value.device == HOST:
            return value
        if not (isinstance(old, Tensor) and old.shape == value.shape and old.dtype == value.dtype and _pinned(old)):
            old = torch.empty_like(value, device=HOST, pin_memory=True)
        return old.copy_(value, non_blocking=True)

    return {
        key: back(value, before.get(key)) if isinstance(value, Tensor) else tree_map_only(Tensor, _copied, value)
        for key, value in state.items()
    }


def _copied(value: Tensor) -> Tensor:
    return value.to(HOST) if value.dim() else value


def _pinned(tensor: Tensor) -> bool:
    return local(tensor).is_pinned()

"""What is saved of a model and an optimizer: tensors by the single-device model's names, and JSON for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from weft.errors import UserError
from weft.torch_private import is_traceable_wrapper_subclass

MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def plain_name(name: str) -> str:
    """A parameter's name without what activation checkpointing and compiling put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def model_tensors(model: nn.Module) -> dict[str, tuple[Tensor, list[str]]]:
    """Parameters and persistent buffers: first name -> the tensor itself and all its names. A tied weight stands once.

    Raises:
        UserError: a module of the user's own has extra state that is no tensor.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    found: dict[int, tuple[Tensor, list[str]]] = {}
    # `state_dict` and not `named_parameters`: it has FSDP put its shards back first, and it has the buffers.
    for name, value in model.state_dict(keep_vars=True).items():
        name = plain_name(name)
        if not isinstance(value, Tensor):
            raise UserError(
                f"{name}: a {type(value).__name__} as extra state cannot be saved, only tensors; make it a buffer"
            )
        found.setdefault(id(value), (value, []))[1].append(name)
    return {names[0]: (tensor, names) for tensor, names in found.values()}


def whole_values(tensor: Tensor) -> Tensor:
    """The tensor, ready to be saved: a DTensor that is a sum still to be made is summed."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
        return tensor.redistribute(placements=placements)
    return tensor


# ---- optimizers: any nesting of tensors and JSON values for each parameter


def optimizer_parameters(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> Iterator[tuple[str, list[str], Tensor, dict]]:
    """Each optimized parameter: its first name, all its names, itself and its group.

    Raises:
        ValueError: the optimizer holds a parameter that is not the model's.
    """
    names = {id(tensor): (name, same) for name, (tensor, same) in model_tensors(model).items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                shape = tuple(parameter.shape)
                raise ValueError(f"the optimizer has a parameter of shape {shape} that is not one of the model's")
            yield *names[id(parameter)], parameter, group


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of an optimizer's state, and its description in JSON.

    Returns:
        `optimizer.<parameter>.<state>` -> tensor, and `{"class": ..., "state": {parameter: {state: description}}}`.
    """
    tensors: dict[str, Tensor] = {}
    state: dict[str, Any] = {}
    for name, _, parameter, _ in optimizer_parameters(optimizer, model):
        values = optimizer.state.get(parameter)
        if values:
            path = OPTIMIZER_PREFIX + name
            state[name] = {key: _describe(value, f"{path}.{key}", parameter, tensors) for key, value in values.items()}
    return tensors, {"class": type(optimizer).__name__, "state": state}


def _describe(value: Any, path: str, parameter: Tensor, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if isinstance(value, Tensor):
        if not isinstance(value, DTensor) and is_traceable_wrapper_subclass(value):
            raise UserError(f"{path}: optimizer state of type {type(value).__name__} cannot be saved yet")
        if path in tensors:
            raise ValueError(f"{path}: two optimizer states of this name")
        tensors[path] = value
        return {"tensor": _layout(value, parameter)}
    if isinstance(value, Mapping):
        return {"dict": {str(key): _describe(item, f"{path}.{key}", parameter, tensors) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        items = [_describe(item, f"{path}.{number}", parameter, tensors) for number, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise UserError(f"{path}: optimizer state of type {type(value).__name__} cannot be saved; keep tensors and numbers")


def _layout(value: Tensor, parameter: Tensor) -> str:
    """How a state tensor lies beside its parameter, in words that hold on any mesh.

    scalar: a plain number on every rank; parameter: shaped and sharded as the parameter; whole: a plain tensor, the
    same on every rank, though the parameter is sharded; other: a tensor of another shape, whole on every rank, and a
    DTensor if the parameter is one.
    """
    same_kind = isinstance(value, DTensor) == isinstance(parameter, DTensor)
    if value.dim() == 0:
        return "other" if isinstance(value, DTensor) else "scalar"
    if value.shape == parameter.shape and same_kind:
        return "parameter"
    return "other" if same_kind else "whole"


def blank_state(
    description: dict[str, Any], path: str, parameter: Tensor, group: dict, index: dict, targets: dict[str, Tensor]
) -> Any:
    """A parameter's state as described, its tensors empty; they are put into `targets` under their names in the file.

    Args:
        path: the state's name in the file.
        group: the parameter's group: fused and capturable optimizers keep their step counter on the device.
        index: the checkpoint's index (dtypes and shapes).
    """
    ((kind, content),) = description.items()
    if kind == "value":
        return content
    if kind == "dict":
        return {k: blank_state(v, f"{path}.{k}", parameter, group, index, targets) for k, v in content.items()}
    if kind in ("list", "tuple"):
        items = [blank_state(v, f"{path}.{n}", parameter, group, index, targets) for n, v in enumerate(content)]
        return tuple(items) if kind == "tuple" else items
    entry = index["tensors"][path]
    dtype = getattr(torch, entry["dtype"])
    like = parameter.detach()
    offloaded = group.get("state_on_host") and entry["shape"]  # weft.parallel.memory.offload
    device = torch.device("cpu") if offloaded else like.device
    if content == "parameter":
        tensor = torch.empty_like(like, dtype=dtype, device=device)
    elif content == "other" and isinstance(like, DTensor):
        local = torch.empty(entry["shape"], dtype=dtype, device=device)
        replicated = [Replicate()] * like.device_mesh.ndim
        tensor = DTensor.from_local(local, like.device_mesh, replicated, run_check=False)
    else:
        on_host = content == "scalar" and _counts_on_host(group)
        tensor = torch.empty(entry["shape"], dtype=dtype, device="cpu" if on_host else device)
    targets[path] = tensor
    return tensor


def _counts_on_host(group: dict) -> bool:
    """PyTorch's optimizers keep `step` on the CPU unless they are fused or capturable; others, by the parameter."""
    return ("fused" in group or "capturable" in group) and not (group.get("fused") or group.get("capturable"))

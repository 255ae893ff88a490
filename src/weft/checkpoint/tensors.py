"""Collects the tensors and JSON values of a model and an optimizer for a checkpoint.

Parameters have the same names as in the model on a single device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from weft.errors import UserError
from weft.formatting import first_few
from weft.parallel import ranks
from weft.torch_private import is_traceable_wrapper_subclass

MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")
_NAMED = 4  # mismatches that a message lists


def plain_name(name: str) -> str:
    """Returns a parameter's name without the prefixes that activation checkpointing, torch.compile and FSDP insert."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def layer_number(name: str) -> int:
    """Returns the index of the decoder's layer that has the tensor `name`; -1 if no layer has it."""
    found = re.match(r"layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def is_projection(name: str) -> bool:
    """Whether a tensor is a projection of hidden states, which only the run that trains it uses."""
    return name.startswith("projections.")


def model_tensors(model: nn.Module) -> dict[str, tuple[Tensor, list[str]]]:
    """Returns a model's parameters and persistent buffers: first name -> (tensor, all names of the tensor).

    A tied weight has one entry.

    Raises:
        UserError: a custom module has extra state that is not a tensor.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    found: dict[int, tuple[Tensor, list[str]]] = {}
    # `state_dict` rather than `named_parameters`: it makes FSDP reshard first, and it includes buffers.
    for name, value in model.state_dict(keep_vars=True).items():
        name = plain_name(name)
        if not isinstance(value, Tensor):
            raise UserError(
                f"{name}: extra state of type {type(value).__name__} cannot be saved; make it a tensor (a buffer)"
            )
        found.setdefault(id(value), (value, []))[1].append(name)
    return {names[0]: (tensor, names) for tensor, names in found.values()}


def reduce_partial(tensor: Tensor) -> Tensor:
    """Detaches a tensor and reduces the `Partial()` placements of a DTensor to `Replicate()`."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
        return tensor.redistribute(placements=placements)
    return tensor


def raise_mismatch(
    path: Path, problems: list[str], used: set[str], saved: set[str], unused: str, summary: str, remedy: str = ""
) -> None:
    """Raises the same UserError on all ranks if any rank found a problem, or if some saved tensor is used by no rank.

    Args:
        problems: mismatches that this rank found, one text each.
        used: names of the saved tensors that this rank uses. Pipeline ranks use different tensors.
        saved: names of all saved tensors.
        unused: what is wrong with a saved tensor that no rank uses. The message contains this text after the tensor's
            name.
        summary, remedy: the message begins with `summary`, lists the problems, and ends with `remedy`.
    """
    answers = ranks.distinct_values([problems, sorted(used)])
    found = [problem for rank_problems, _ in answers for problem in rank_problems]
    found += [f"{name} {unused}" for name in sorted(saved.difference(*(names for _, names in answers)))]
    if found:
        error = UserError(f"{summary}: {first_few(found, _NAMED, '; ')}{remedy}", path)
        error.quiet = ranks.rank() != 0
        raise error


# ---- optimizers: any nesting of tensors and JSON values per parameter


def optimizer_parameters(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> Iterator[tuple[str, list[str], Tensor, dict]]:
    """Yields (first name, all names, parameter, parameter group) for each optimized parameter.

    Raises:
        ValueError: the optimizer has a parameter that is not in the model.
    """
    names = {id(tensor): (name, same) for name, (tensor, same) in model_tensors(model).items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                shape = tuple(parameter.shape)
                raise ValueError(f"the optimizer has a parameter of shape {shape} that is not in the model")
            yield *names[id(parameter)], parameter, group


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Splits an optimizer's state into tensors and a JSON value.

    Returns:
        Two dicts: name (`optimizer.<parameter>.<key>`) -> tensor, and the JSON value
        `{"class": ..., "state": {parameter: {key: description}}}`. A description contains the values that are not
        tensors, and how each tensor is sharded. `empty_state` rebuilds a value from its description.
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
    """Returns a description of one value of an optimizer's state, and adds the value's tensors to `tensors`.

    Args:
        path: the value's name in the checkpoint.
    """
    if isinstance(value, Tensor):
        if not isinstance(value, DTensor) and is_traceable_wrapper_subclass(value):
            raise UserError(f"{path}: tensors of type {type(value).__name__} cannot be saved; use plain tensors")
        if path in tensors:
            raise ValueError(f"{path}: two optimizer states have this name")
        tensors[path] = value
        return {"tensor": _layout(value, parameter)}
    if isinstance(value, Mapping):
        return {"dict": {str(key): _describe(item, f"{path}.{key}", parameter, tensors) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        items = [_describe(item, f"{path}.{number}", parameter, tensors) for number, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise UserError(f"{path}: values of type {type(value).__name__} cannot be saved; use tensors and numbers only")


def _layout(value: Tensor, parameter: Tensor) -> str:
    """Returns how an optimizer-state tensor is sharded, as a word that is the same on every mesh.

    - "scalar": a plain tensor (not a DTensor) without dimensions, equal on all ranks.
    - "parameter": a tensor with the shape and the sharding of `parameter`.
    - "whole": a tensor with dimensions, where only one of `value` and `parameter` is a DTensor. `empty_state` rebuilds
      it as a plain tensor, equal on all ranks.
    - "other": any other tensor. `empty_state` rebuilds it as a replicated DTensor if `parameter` is a DTensor, else as
      a plain tensor.
    """
    same_kind = isinstance(value, DTensor) == isinstance(parameter, DTensor)
    if value.dim() == 0:
        return "other" if isinstance(value, DTensor) else "scalar"
    if value.shape == parameter.shape and same_kind:
        return "parameter"
    return "other" if same_kind else "whole"


def empty_state(
    description: dict[str, Any], path: str, parameter: Tensor, group: dict, index: dict, targets: dict[str, Tensor]
) -> Any:
    """Rebuilds one value of a parameter's optimizer state. The tensors in it are uninitialized, and added to `targets`.

    Args:
        description: the value's description, from `optimizer_state`.
        path: the value's name in the checkpoint.
        group: the parameter group, which decides where a step counter is: on the CPU or on the device.
        index: the checkpoint's index, with dtypes and shapes.
        targets: saved name -> tensor to load.
    """
    ((kind, content),) = description.items()
    if kind == "value":
        return content
    if kind == "dict":
        return {k: empty_state(v, f"{path}.{k}", parameter, group, index, targets) for k, v in content.items()}
    if kind in ("list", "tuple"):
        items = [empty_state(v, f"{path}.{n}", parameter, group, index, targets) for n, v in enumerate(content)]
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
    """Whether an optimizer keeps its step counter on the CPU: PyTorch's optimizers do, unless fused or capturable."""
    return ("fused" in group or "capturable" in group) and not (group.get("fused") or group.get("capturable"))

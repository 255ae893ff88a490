"""Maps the tensors of nested inputs and outputs: tuples, dicts, dataclasses and other objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.planner.parallelize.torch_private import tree_map


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Returns `value` with `function` applied to each tensor in containers and dataclasses. Copies what changes."""

    def leaf(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            return function(one)
        if not is_dataclass(one) or isinstance(one, type):
            return one
        old = {item.name: getattr(one, item.name) for item in fields(one) if hasattr(one, item.name)}
        new = {name: map_tensors(function, inner) for name, inner in old.items()}
        if all(new[name] is old[name] for name in old):
            return one
        changed = copy.copy(one)
        for name, inner in new.items():
            object.__setattr__(changed, name, inner)  # also of a frozen dataclass
        return changed

    return tree_map(leaf, value)


def map_objects(function: Callable[[DTensor], Any], value: Any, seen: set[int] | None = None) -> None:
    """Applies `function` to DTensors in attributes of other objects, in place: such as the keys of a cache."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, torch.Tensor | nn.Module | type):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        inner: Any = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    elif isinstance(value, tuple):
        inner = ()
        for one in value:
            map_objects(function, one, seen)
    else:
        inner = vars(value).items() if hasattr(value, "__dict__") and not callable(value) else ()
    for key, one in list(inner):
        if not isinstance(one, DTensor):
            map_objects(function, one, seen)
        elif isinstance(value, dict | list):
            value[key] = function(one)  # type: ignore[index]
        else:
            setattr(value, key, function(one))


def first_float(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Returns the first floating-point tensor of a call, positional arguments first; None if there is none."""
    found: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            found.append(tensor)
        return tensor

    map_tensors(look, (args, kwargs))
    return found[0] if found else None


def call_of(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns positional and keyword arguments of example inputs.

    Args:
        example_inputs: one tensor; a tuple or list of positional arguments; a dict of keyword arguments.
    """
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (tuple(example_inputs) if isinstance(example_inputs, tuple | list) else (example_inputs,)), {}


def batch_rows(value: Any) -> int | None:
    """Returns the number of rows of a batch: dim 0 of the first tensor with several dims, or else of one dim."""
    shapes: list[torch.Size] = []
    map_tensors(lambda tensor: shapes.append(tensor.shape), value)
    return next((shape[0] for shape in [*(one for one in shapes if len(one) > 1), *shapes] if shape), None)

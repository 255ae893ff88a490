"""Runs modules that DTensor cannot run, such as those with data-dependent shapes, on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from weft.planner.parallelize.axes import placements_on, ranks_of, replicated_on
from weft.planner.parallelize.containers import map_tensors
from weft.planner.parallelize.functions import Functions
from weft.planner.parallelize.torch_private import parameters_of, refresh_flat_weights


def isolate(mode: Functions, module: nn.Module, how: str, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """Runs a module's forward on plain tensors, with full parameters.

    Args:
        how: `rows`: each rank runs the rows (dim 0) of its data shard, which must not depend on other rows. `whole`:
            each rank runs all rows. With `rows`, if `dp` does not divide the rows, all rows run on each rank.
    """
    if mode.paused:  # within another island
        return forward(*args, **kwargs)
    mesh = mode.mesh
    shapes: list[torch.Size] = []
    map_tensors(lambda value: shapes.append(value.shape), (args, kwargs))
    rows = next((shape[0] for shape in shapes if len(shape) > 0), None)
    split = how == "rows" and rows is not None and rows % ranks_of(mesh, "dp") == 0
    whole = replicated_on(mesh)
    by_rows = placements_on(mesh, Shard(0), Replicate())
    partial = placements_on(mesh, Partial() if split else Replicate(), Replicate())

    def enter(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, DTensor):
            return value
        sharded = split and value.dim() > 0 and value.shape[0] == rows
        placed = value.redistribute(placements=by_rows if sharded else whole)
        return placed.to_local(grad_placements=by_rows if sharded else partial)

    def leave(value: torch.Tensor) -> torch.Tensor:
        if split and value.dim() == 0:
            raise NotImplementedError(f"{type(module).__name__} as an island of rows returns a scalar")
        return DTensor.from_local(value, mesh, by_rows if split else whole, run_check=False)

    owners = [one for one in module.modules() if parameters_of(one)]
    stored = [dict(parameters_of(one)) for one in owners]
    full: dict[Any, torch.Tensor] = {}
    try:
        for owner, parameters in zip(owners, stored, strict=True):
            for name, parameter in parameters.items():
                if isinstance(parameter, DTensor) and parameter not in full:
                    local = parameter.redistribute(placements=whole).to_local(grad_placements=partial)
                    full[parameter] = local.to(mode.dtype) if local.is_floating_point() else local
                parameters_of(owner)[name] = full.get(parameter, parameter)
            refresh_flat_weights(owner)
        with mode.pause():
            out = forward(*map_tensors(enter, args), **map_tensors(enter, kwargs))
    finally:
        for owner, parameters in zip(owners, stored, strict=True):
            parameters_of(owner).update(parameters)
    return map_tensors(leave, out)

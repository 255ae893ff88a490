"""Computes the norm of sharded gradients, and clips gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft.parallel.local_parameters import local
from weft.torch_private import foreach_norm, foreach_scale


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[nn.Parameter],
    pp_group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Returns the global L2 norm of all gradients, the same on every rank: float64, a scalar on the ranks' device.

    The host does not wait for the device.

    Args:
        pp_group: process group of `pp`, whose ranks have different parameters; None without a pipeline.
        device: device of the norm. Default: the device of the gradients' mesh, which a stage without gradients lacks.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    shards = [local(gradient) for gradient in gradients]
    # One sum of squares for each set of mesh axes that gradients are sharded over.
    by_axes: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    for gradient, shard in zip(gradients, shards, strict=True):
        axes: tuple = ()
        if isinstance(gradient, DTensor) and (mesh := gradient.device_mesh).size() > 1:
            axes = tuple((mesh, i) for i, p in enumerate(gradient.placements) if not p.is_replicate())
        by_axes[axes].append(shard)
    # Gradients may be on the host, but collectives need the mesh's device.
    meshes = (g.device_mesh.device_type for g in gradients if isinstance(g, DTensor))
    place = device or next(meshes, shards[0].device if shards else None)
    total = torch.zeros((), dtype=torch.float64, device=place)
    for axes, values in by_axes.items():
        subtotal = torch.stack(foreach_norm(values)).to(torch.float64).square().sum().to(place)
        for mesh, dim in axes:
            if mesh.size(dim) > 1:
                dist.all_reduce(subtotal, group=mesh.get_group(dim))
        total += subtotal
    if pp_group is not None:
        dist.all_reduce(total, group=pp_group)
    return total.sqrt()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None, norm: float | torch.Tensor) -> None:
    """Scales all gradients so that their global L2 norm is at most `max_norm` (Pascanu et al., 2013).

    Args:
        max_norm: upper limit of the norm; None does not scale gradients.
        norm: the result of `gradient_norm`. If it is a tensor, its value is not read: the gradients are multiplied by a
            factor on the device, which is 1 if the norm is below the limit.
    """
    if max_norm is None or (not isinstance(norm, torch.Tensor) and not norm > max_norm):  # NaN: nothing to scale
        return
    shards = [local(p.grad) for p in parameters if p.grad is not None]
    if not shards:
        return
    if not isinstance(norm, torch.Tensor):
        foreach_scale(shards, max_norm / norm)
        return
    factor, by_device = (max_norm / norm).clamp(max=1.0), defaultdict(list)
    for shard in shards:
        by_device[shard.device].append(shard)
    for device, tensors in by_device.items():
        foreach_scale(tensors, factor.to(device))


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    pp_group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> float:
    """Clips gradients (see `scale_gradients`). Returns their norm before clipping, for which the host waits."""
    parameters = list(parameters)
    norm = gradient_norm(parameters, pp_group, device).item()
    scale_gradients(parameters, max_norm, norm)
    return norm

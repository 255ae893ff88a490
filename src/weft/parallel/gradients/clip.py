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
def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    pp_group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> float:
    """Scales all gradients so that their global L2 norm is at most `max_norm` (Pascanu et al., 2013).

    Args:
        max_norm: upper limit of the norm; None does not scale gradients.
        pp_group: process group of `pp`, whose ranks have different parameters; None without a pipeline.
        device: device of a pipeline's collectives. A stage whose parameters are all frozen has no gradients to tell it.

    Returns:
        The global norm before clipping, the same on every rank.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients and pp_group is None:
        return 0.0
    shards = [local(gradient) for gradient in gradients]
    # One sum of squares for each set of mesh axes that gradients are sharded over.
    by_axes: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    for gradient, shard in zip(gradients, shards, strict=True):
        axes: tuple = ()
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            axes = tuple((mesh, i) for i, p in enumerate(gradient.placements) if not p.is_replicate())
        by_axes[axes].append(shard)
    # Gradients may be on the host, but collectives need the mesh's device.
    meshes = (g.device_mesh.device_type for g in gradients if isinstance(g, DTensor))
    place = next(meshes, shards[0].device if shards else device)
    total = torch.zeros((), dtype=torch.float64, device=place)
    for axes, values in by_axes.items():
        subtotal = torch.stack(foreach_norm(values)).to(torch.float64).square().sum().to(place)
        for mesh, dim in axes:
            if mesh.size(dim) > 1:
                dist.all_reduce(subtotal, group=mesh.get_group(dim))
        total += subtotal
    if pp_group is not None:
        dist.all_reduce(total, group=pp_group)
    norm = total.sqrt().item()
    if shards and max_norm is not None and norm > max_norm:
        foreach_scale(shards, max_norm / norm)
    return norm

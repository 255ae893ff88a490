"""The norm of a sharded gradient, and clipping by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft.parallel.local_parameters import local
from weft.torch_private import foreach_norm, foreach_scale


class NothingToScatter:
    """FSDP2's reduce-scatter where a rank keeps the whole gradient: its result is the buffer that it is called with.

    FSDP2 asks for a buffer to gather a group's gradients in, and for one for their sum, and copies the first to the
    second if there is no other rank. Given the same tensor twice, that copy is none.
    """

    def __init__(self) -> None:
        self.gathered: torch.Tensor | None = None

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The first buffer is a new one; the second is the first."""
        gathered, self.gathered = self.gathered, None
        if gathered is None or gathered.shape != torch.Size(size) or gathered.dtype != dtype:
            gathered = self.gathered = torch.empty(size, dtype=dtype, device=device)
        return gathered

    def __call__(self, *arguments, **named) -> None:
        raise RuntimeError("a reduce-scatter over one rank is not called")


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float | None, stages: dist.ProcessGroup | None = None
) -> float:
    """Scale all gradients so that their common L2 norm is at most `max_norm` (Pascanu et al., 2013).

    Args:
        stages: the ranks of a pipeline, that have other parameters.

    Returns:
        The norm before clipping, of the whole gradient, the same on every rank.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return 0.0
    parts = [local(gradient) for gradient in gradients]
    # One sum for each set of axes that parameters are cut over: norms of different meshes cannot be stacked.
    together: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    for gradient, part in zip(gradients, parts, strict=True):
        axes: tuple = ()
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            axes = tuple((mesh, i) for i, p in enumerate(gradient.placements) if not p.is_replicate())
        together[axes].append(part)
    # Gradients may be on the host, and groups speak from device to device.
    device = next((g.device_mesh.device_type for g in gradients if isinstance(g, DTensor)), parts[0].device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for axes, values in together.items():
        subtotal = torch.stack(foreach_norm(values)).to(torch.float64).square().sum().to(device)
        for mesh, dim in axes:
            if mesh.size(dim) > 1:
                dist.all_reduce(subtotal, group=mesh.get_group(dim))
        total += subtotal
    if stages is not None:
        dist.all_reduce(total, group=stages)
    norm = total.sqrt().item()
    if max_norm is not None and norm > max_norm:
        foreach_scale(parts, max_norm / norm)
    return norm

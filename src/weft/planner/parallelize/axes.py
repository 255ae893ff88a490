"""Placements on a mesh that may lack an axis: axes of one rank are left out.

The axes are `dp` and up to two tensor axes, `tp` and `tp2`. A placement over the tensor axes is one placement, which is
over `tp`, or a pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

TENSOR = ("tp", "tp2")
OverTensor = Placement | Sequence[Placement]  # a placement over the tensor axes


def ranks_of(mesh: DeviceMesh, axis: str) -> int:
    """Returns the number of ranks of an axis; 1 if the mesh lacks the axis."""
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(axis)) if axis in names else 1


def over_tensor(tp: OverTensor) -> dict[str, Placement]:
    """Returns tensor axis -> placement."""
    return dict(zip(TENSOR, (tp, Replicate()) if isinstance(tp, Placement) else tp, strict=True))


def sharded_dims(tp: OverTensor) -> list[int]:
    """Returns the dimensions that tensor axes shard."""
    return [one.dim for one in over_tensor(tp).values() if isinstance(one, Shard)]


def placements_on(mesh: DeviceMesh, dp: Placement, tp: OverTensor) -> list[Placement]:
    """Returns a tensor's placements on a mesh, given those over `dp` and the tensor axes."""
    given = {"dp": dp, **over_tensor(tp)}
    return [given[name] for name in mesh.mesh_dim_names or ()]


def with_placements(mesh: DeviceMesh, old: Sequence[Placement], new: Mapping[str, Placement]) -> list[Placement]:
    """Returns placements with other ones over some axes, of which the mesh may lack some."""
    names = mesh.mesh_dim_names or ()
    return [new.get(name, placement) for name, placement in zip(names, old, strict=True)]


def replicated_on(mesh: DeviceMesh) -> list[Placement]:
    """Returns the placements of a tensor that all ranks have."""
    return [Replicate()] * mesh.ndim

"""Placements on a mesh that may lack the axis `dp` or `tp`: axes of one rank are left out."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate


def ranks_of(mesh: DeviceMesh, axis: str) -> int:
    """Returns the number of ranks of an axis; 1 if the mesh lacks the axis."""
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(axis)) if axis in names else 1


def placements_on(mesh: DeviceMesh, dp: Placement, tp: Placement) -> list[Placement]:
    """Returns a tensor's placements on a mesh, given those over `dp` and `tp`."""
    given = {"dp": dp, "tp": tp}
    return [given[name] for name in mesh.mesh_dim_names or ()]


def with_placement(mesh: DeviceMesh, old: Sequence[Placement], axis: str, new: Placement) -> list[Placement]:
    """Returns placements with another one over one axis; the same ones if the mesh lacks the axis."""
    names = mesh.mesh_dim_names or ()
    return [new if name == axis else placement for name, placement in zip(names, old, strict=True)]


def replicated_on(mesh: DeviceMesh) -> list[Placement]:
    """Returns the placements of a tensor that all ranks have."""
    return [Replicate()] * mesh.ndim

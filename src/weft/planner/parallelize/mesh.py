"""Starts the process group of a plan, and makes its mesh."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.errors import UserError


def start_processes(ranks: int) -> None:
    """Starts the default process group if there is none: from torchrun's environment, or else of one rank.

    Raises:
        UserError: the number of processes is not `ranks`.
    """
    if not dist.is_initialized():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            if int(os.environ["WORLD_SIZE"]) == ranks:
                _start_from_environment()
        elif ranks == 1:
            dist.init_process_group(_backend(), store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    running = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    if running < ranks:
        raise UserError(
            f"the plan is for {ranks} devices, and {running} process{'es run' if running > 1 else ' runs'}; start the "
            f"program with torchrun --nproc-per-node {ranks}, or plan for devices={running}"
        )


def _start_from_environment() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group(_backend())


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Returns `dp 2 x tp 4`: the sizes of the axes, without those that few plans have where they have one rank."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name in ("dp", "tp"))


def mesh_of(sizes: Mapping[str, int], mesh: DeviceMesh | None) -> DeviceMesh:
    """Returns a mesh of the devices of `mesh`, or of all ranks, with those of some axes that have 2 ranks.

    If none has, the mesh has the axis `dp`. Rules of operators take less time on meshes with fewer axes.

    Args:
        sizes: name of an axis -> number of ranks.

    Raises:
        UserError: the number of devices is not the product of the sizes.
    """
    several = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
    names, shape, devices = tuple(several), tuple(several.values()), math.prod(several.values())
    if mesh is None:
        if dist.get_world_size() != devices:
            raise UserError(
                f"the plan is for {devices} devices, and {dist.get_world_size()} processes run; give apply a mesh of "
                f"{devices} of them, or plan for devices={dist.get_world_size()}"
            )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return init_device_mesh(device, shape, mesh_dim_names=names)
    if mesh.size() != devices:
        raise UserError(f"the plan is for {devices} devices ({mesh_text(sizes)}), and the mesh has {mesh.size()}")
    if tuple(mesh.shape) == shape and mesh.mesh_dim_names == names:
        return mesh
    return DeviceMesh(mesh.device_type, mesh.mesh.view(shape), mesh_dim_names=names)

"""Defines `Mesh`, the place of this process in the mesh, for programs that train with their own loop."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from weft.config.mesh import AXES
from weft.errors import UserError
from weft.parallel.world import World

NAMES = (*AXES, "ep", "dp")
PARTS = ("rank", "size", "group")


class Mesh:
    """The place of this process in the mesh of a run.

    For each axis there are three attributes: `tp_rank` (this rank's coordinate), `tp_size`, and `tp_group` (the process
    group of the ranks that differ only in this coordinate). The axes are `pp`, `dp_replicate`, `dp_shard`, `cp`, `tp`,
    `ep`, and `dp`, which is `dp_replicate` x `dp_shard`: ranks with equal `dp_rank` process the same sequences.

    >>> trainer.mesh.dp_rank, trainer.mesh.dp_size, trainer.mesh.tp_size
    (0, 1, 1)

    All ranks must create it, because it creates a process group.

    Attributes:
        rank: rank of this process among all ranks.
        size: number of ranks (world size).
        device: the device of this rank's tensors.
    """

    def __init__(self, world: World):
        self._world, shape = world, world.shape
        self.rank, self.size, self.device = world.rank, world.ranks, world.device
        self._dp: Any = world.group("dp_replicate" if shape.dp_replicate > 1 else "dp_shard")
        if shape.dp_replicate > 1 and shape.dp_shard > 1:
            ranks = world.mesh.mesh.view(shape.pp, shape.data_ranks, -1).transpose(1, 2).flatten(0, 1)
            self._dp, _ = dist.new_subgroups_by_enumeration(ranks.tolist())

    def __getattr__(self, name: str) -> Any:
        axis, _, part = name.rpartition("_")
        if axis not in NAMES or part not in PARTS:
            raise AttributeError(
                f"the mesh has no {name!r}; use an axis ({', '.join(NAMES)}) with _rank, _size or _group"
            )
        world = self._world
        if axis == "dp":
            return {"rank": world.data_rank, "size": world.data_ranks, "group": self._dp}[part]
        if part == "size":
            return world.shape.sizes[axis]
        if axis != "ep":
            return world.axis_rank(axis) if part == "rank" else world.group(axis)
        if world.ep_mesh is None and part == "group":
            raise UserError("trainer.mesh.ep_group: the mesh has no expert parallelism (parallel.ep is 1)")
        if world.ep_mesh is None:
            return 0
        return world.ep_mesh.get_local_rank("ep") if part == "rank" else world.ep_mesh.get_group("ep")

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), *(f"{axis}_{part}" for axis in NAMES for part in PARTS)])

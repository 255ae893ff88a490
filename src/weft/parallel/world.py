"""Defines `World`, the ranks of a run: process group, device meshes, device, and reductions of scalars."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.config.mesh import AXES, MeshShape, ParallelSection, mesh_shape
from weft.errors import UserError
from weft.observe.console import Console
from weft.parallel import ranks
from weft.parallel.rendezvous import COLLECTIVE_TIMEOUT, next_store
from weft.torch_private import forget_groups

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The ranks of a run, from the view of this process's rank.

    Attributes:
        rank: rank of this process.
        ranks: number of ranks of the run.
        device: device of this rank's tensors.
        shape: sizes of the mesh axes.
        mesh: mesh with the axes `pp`, `dp_replicate`, `dp_shard`, `cp` and `tp`; any size can be 1.
        fsdp_mesh: mesh for FSDP2, with the axis `dp_shard` x `cp`, preceded by `dp_replicate` if its size is above 1.
        tp_mesh: mesh of the axis `tp` for parameters; None if its size is 1.
        ep_mesh: mesh that experts are sharded over: `ep`, and `tp` if its size is above 1. None without `ep`.
        ep_fsdp_mesh: mesh for FSDP2 of the experts, over the ranks with the same experts; None without `ep`.
        token_group: process group of the ranks with the same stage and `tp` rank, which process different tokens. None
            means all ranks of the run.
    """

    rank: int
    ranks: int
    device: torch.device
    shape: MeshShape
    mesh: DeviceMesh
    fsdp_mesh: DeviceMesh
    tp_mesh: DeviceMesh | None = None
    ep_mesh: DeviceMesh | None = None
    ep_fsdp_mesh: DeviceMesh | None = None
    token_group: dist.ProcessGroup | None = None

    def axis_rank(self, axis: str) -> int:
        """Returns this rank's coordinate on a mesh axis."""
        return self.mesh.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        """Returns the process group of a mesh axis: ranks that differ from this rank only in that axis's coordinate."""
        return self.mesh.get_group(axis)

    @property
    def first_of_data_rank(self) -> bool:
        """Whether this rank is the first of the ranks (of `pp`, `cp` and `tp`) that process the same sequences."""
        return self.axis_rank("pp") == self.axis_rank("cp") == self.axis_rank("tp") == 0

    @property
    def data_rank(self) -> int:
        """The index of this rank's shard of the global batch, from 0 to `data_ranks` - 1."""
        return self.axis_rank("dp_replicate") * self.shape.dp_shard + self.axis_rank("dp_shard")

    @property
    def data_ranks(self) -> int:
        """The number of shards of the global batch."""
        return self.shape.data_ranks

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """The process group of `pp`; None if its size is 1."""
        return self.group("pp") if self.shape.pp > 1 else None

    def sum(self, *values: float | torch.Tensor, votes: Sequence[float] = ()) -> list[float]:
        """Sums scalars over ranks in float64, in one collective.

        Args:
            values: scalars that are equal on all ranks that process the same sequences; each data rank counts once.
            votes: scalars that are summed over all ranks.

        Returns:
            The sums of `values`, then the sums of `votes`.
        """
        device = next((v.device for v in values if isinstance(v, torch.Tensor)), torch.device("cpu"))
        if self.ranks == 1 and device.type == "cpu":  # no other ranks, and no device to wait for
            return [float(v.detach() if isinstance(v, torch.Tensor) else v) for v in (*values, *votes)]
        scalars = [torch.as_tensor(v, dtype=torch.float64, device=device).detach() for v in values]
        counts = torch.tensor(votes, dtype=torch.float64, device=device)
        total = torch.cat([torch.stack(scalars), counts]) if scalars else counts
        return self.sum_on_device(total, len(values)).tolist()

    def sum_on_device(self, total: torch.Tensor, values: int | None = None) -> torch.Tensor:
        """Sums a vector over ranks in place, and returns it. The host does not wait for the device.

        Args:
            values: number of leading elements that are equal on all ranks that process the same sequences; each data
                rank counts once. Default: all elements.
        """
        if self.ranks > 1:
            if not self.first_of_data_rank:
                total[:values] = 0
            dist.all_reduce(total)
        return total

    def sum_stages(self, *values: float) -> list[float]:
        """Sums scalars over the ranks of this rank's pipeline."""
        if self.pp_group is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.pp_group)
        return total.tolist()

    def sum_tokens(self, tensor: torch.Tensor) -> None:
        """All-reduces counts of tokens in place over `token_group`, whose ranks process different tokens."""
        if self.shape.data_ranks * self.shape.cp > 1:
            dist.all_reduce(tensor, group=self.token_group)

    def agree(self, act: Callable[[], T], only_first: bool = False) -> T:
        """Runs `act` on all ranks, and raises an exception of any rank on all ranks. See `ranks.agree`."""
        return ranks.agree(act, only_first)

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.ranks > 1:
            dist.barrier()

    def close(self) -> None:
        """Destroys the process group. First waits for all ranks, because gloo aborts if a rank still communicates."""
        if dist.is_initialized():
            self.barrier()
            dist.destroy_process_group()
            forget_groups()

    def abandon(self) -> None:
        """Destroys the process group after a failure, if there is only one rank. On several ranks this could hang."""
        if dist.is_initialized() and self.ranks == 1:
            dist.destroy_process_group()
            forget_groups()


def local_device(console: Console) -> torch.device:
    """Returns the GPU of this process's local rank, or the CPU if there is no GPU.

    If the host has an accelerator that is not supported, prints a line that says so.

    Raises:
        UserError: if the host has GPUs, but fewer than local ranks.
    """
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", 0))
        if local >= torch.cuda.device_count():
            raise UserError(
                f"local rank {local} has no GPU: the number of GPUs of this machine is "
                f"{torch.cuda.device_count()}; lower --nproc to this number"
            )
        return torch.device("cuda", local)
    other = torch.accelerator.current_accelerator(check_available=True)
    if other is not None:
        console.line(f"this machine's {other.type.upper()} device is not supported; the run uses the CPU")
    return torch.device("cpu")


def start_world(section: ParallelSection) -> World:
    """Initializes the process group, unless it is already initialized, and builds the meshes.

    The number of ranks comes from torchrun's environment variables; without them, there is a single rank.

    Raises:
        UserError: if the mesh does not fit the number of ranks, there are fewer GPUs than local ranks, or async_tp is
            used on CPUs.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    shape = mesh_shape(section, world_size)
    device = local_device(Console(prints=rank == 0))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if section.async_tp and device.type != "cuda":
        error = UserError("parallel.async_tp needs GPUs, but this run is on CPUs; remove the key")
        error.quiet = rank != 0  # raised on all ranks
        raise error
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(
                backend, store=next_store(), rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
            )
        else:
            # No port, no host name: a run of one process needs no network.
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return World(rank, world_size, device, shape, **meshes(shape, device))


def meshes(shape: MeshShape, device: torch.device) -> dict[str, Any]:
    """Creates the meshes and the token group of `World`. Returns attribute name -> mesh or group.

    With `cp`, parameters use a second mesh of the same ranks, in which one axis `fsdp` replaces `dp_shard` and `cp`.
    With `ep`, experts use a third mesh, in which two axes `efsdp` and `ep` replace `fsdp`.
    """
    mesh = init_device_mesh(device.type, tuple(shape.sizes[axis] for axis in AXES), mesh_dim_names=AXES)
    made: dict[str, Any] = {"mesh": mesh}
    weights, shard = mesh, "dp_shard"
    if shape.cp > 1:
        sizes, shard = (shape.pp, shape.dp_replicate, shape.fsdp, shape.tp), "fsdp"
        weights = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "dp_replicate", shard, "tp"))
    made["fsdp_mesh"] = weights["dp_replicate", shard] if shape.dp_replicate > 1 else weights[shard]
    if shape.tp > 1:
        made["tp_mesh"] = weights["tp"]
    if shape.pp * shape.tp > 1 and shape.data_ranks * shape.cp > 1:
        same = mesh.mesh.view(shape.pp, -1, shape.tp).transpose(1, 2).flatten(0, 1)
        made["token_group"], _ = dist.new_subgroups_by_enumeration(same.tolist())
    if shape.ep > 1:
        axes = ("pp", "dp_replicate", "efsdp", "ep", "tp")
        sizes = (shape.pp, shape.dp_replicate, shape.fsdp // shape.ep, shape.ep, shape.tp)
        experts = init_device_mesh(device.type, sizes, mesh_dim_names=axes)
        made["ep_mesh"] = experts["ep", "tp"] if shape.tp > 1 else experts["ep"]
        made["ep_fsdp_mesh"] = experts["dp_replicate", "efsdp"] if shape.dp_replicate > 1 else experts["efsdp"]
    return made

"""The ranks of this run: who they are, which device is theirs, and the few things that all of them say together."""

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
    """All ranks, seen from one of them.

    Attributes:
        rank: this process, of `ranks`.
        device: where its tensors are.
        mesh: axes `pp`, `dp_replicate`, `dp_shard`, `cp` and `tp`; all sizes may be 1.
        fsdp: the axis that parameters are sharded over, `dp_shard` x `cp`; with `dp_replicate` before it if there are
            several copies.
        tensor: the axis `tp` that parameters are cut over; None without.
        experts: axes `ep` and, if there is one, `tp`: what experts are cut over; None without `ep`.
        experts_fsdp: as `fsdp`, for the ranks that have the same experts; None without `ep`.
    """

    rank: int
    ranks: int
    device: torch.device
    shape: MeshShape
    mesh: DeviceMesh
    fsdp: DeviceMesh
    tensor: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    experts_fsdp: DeviceMesh | None = None
    tokens: dist.ProcessGroup | None = None

    def place(self, axis: str) -> int:
        """This rank's number on an axis."""
        return self.mesh.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one on an axis alone."""
        return self.mesh.get_group(axis)

    @property
    def first_of_rows(self) -> bool:
        """Whether it is the first of the ranks that share its rows, and so speaks for its fellows on pp, cp and tp."""
        return self.place("pp") == self.place("cp") == self.place("tp") == 0

    @property
    def data_rank(self) -> int:
        """Which rows of the global batch it sees, of `data_ranks`."""
        return self.place("dp_replicate") * self.shape.dp_shard + self.place("dp_shard")

    @property
    def data_ranks(self) -> int:
        """Ranks that see different rows."""
        return self.shape.data_ranks

    @property
    def stages(self) -> dist.ProcessGroup | None:
        """The ranks that have the other stages of a pipeline; None where there is none."""
        return self.group("pp") if self.shape.pp > 1 else None

    def sum(self, *values: float | torch.Tensor, votes: Sequence[float] = ()) -> list[float]:
        """The sums of scalars over the ranks that have different rows, in float64, in one collective.

        Args:
            values: what rows count for: the same on all ranks that have the same ones.
            votes: summed over all ranks.
        """
        device = next((v.device for v in values if isinstance(v, torch.Tensor)), torch.device("cpu"))
        given = [*values, *votes]
        total = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device).detach() for v in given])
        if self.ranks > 1:
            if not self.first_of_rows:
                total[: len(values)] = 0
            dist.all_reduce(total)
        return total.tolist()

    def sum_stages(self, *values: float) -> list[float]:
        """The sums over a pipeline's stages."""
        if self.stages is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.stages)
        return total.tolist()

    def sum_tokens(self, tensor: torch.Tensor) -> None:
        """Add up in place what ranks with different tokens have counted; each stage and tensor rank for itself."""
        if self.shape.data_ranks * self.shape.cp > 1:
            dist.all_reduce(tensor, group=self.tokens)

    def agree(self, act: Callable[[], T], only_first: bool = False) -> T:
        """`ranks.agree`."""
        return ranks.agree(act, only_first)

    def gather(self, value: T) -> list[T]:
        """`ranks.gather`: every rank's `value`, on every rank."""
        return ranks.gather(value)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.ranks > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave together: gloo aborts when one rank tears down while another still talks."""
        if dist.is_initialized():
            self.barrier()
            dist.destroy_process_group()
            forget_groups()

    def abandon(self) -> None:
        """Leave without the others: some of them may be gone or stuck."""
        if dist.is_initialized() and self.ranks == 1:
            dist.destroy_process_group()


def local_device(console: Console) -> torch.device:
    """This process's GPU, by its local rank, or the CPU. An accelerator that Weft does not support is named.

    Raises:
        UserError: this machine has fewer GPUs.
    """
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", 0))
        if local >= torch.cuda.device_count():
            raise UserError(
                f"local rank {local} has no GPU: this machine has {torch.cuda.device_count()}; lower --nproc to that"
            )
        return torch.device("cuda", local)
    other = torch.accelerator.current_accelerator(check_available=True)
    if other is not None:
        console.line(f"this machine's {other.type.upper()} device is not supported; the CPU does the work")
    return torch.device("cpu")


def start_world(section: ParallelSection) -> World:
    """Join the process group that torchrun's environment names, or make one of a single process; build the mesh.

    Raises:
        UserError: the mesh does not fit the number of ranks.
    """
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    shape = mesh_shape(section, ranks)
    device = local_device(Console(speaks=rank == 0))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if section.async_tp and device.type != "cuda":
        mistake = UserError(
            "parallel.async_tp: GPUs write to one another's memory for it, and there is none; remove it"
        )
        mistake.quiet = rank != 0  # all ranks find the same
        raise mistake
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(
                backend, store=next_store(), rank=rank, world_size=ranks, timeout=COLLECTIVE_TIMEOUT
            )
        else:
            # No port, no host name: a run of one process needs no network.
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return World(rank, ranks, device, shape, **meshes(shape, device))


def meshes(shape: MeshShape, device: torch.device) -> dict[str, Any]:
    """The mesh of all axes, and those that work is shared over: `World`'s attributes.

    Parameters have a mesh of their own, of the same ranks, where `dp_shard` x `cp` is one axis; and experts' have one
    where it is `efsdp` x `ep`.
    """
    mesh = init_device_mesh(device.type, tuple(shape.sizes[axis] for axis in AXES), mesh_dim_names=AXES)
    made: dict[str, Any] = {"mesh": mesh}
    weights, shard = mesh, "dp_shard"
    if shape.cp > 1:
        sizes, shard = (shape.pp, shape.dp_replicate, shape.fsdp, shape.tp), "fsdp"
        weights = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "dp_replicate", shard, "tp"))
    made["fsdp"] = weights["dp_replicate", shard] if shape.dp_replicate > 1 else weights[shard]
    if shape.tp > 1:
        made["tensor"] = weights["tp"]
    if shape.pp * shape.tp > 1 and shape.data_ranks * shape.cp > 1:
        # One group for each stage and tensor rank: all ranks with other tokens.
        same = mesh.mesh.view(shape.pp, -1, shape.tp).transpose(1, 2).flatten(0, 1)
        made["tokens"], _ = dist.new_subgroups_by_enumeration(same.tolist())
    if shape.ep > 1:
        axes = ("pp", "dp_replicate", "efsdp", "ep", "tp")
        sizes = (shape.pp, shape.dp_replicate, shape.fsdp // shape.ep, shape.ep, shape.tp)
        experts = init_device_mesh(device.type, sizes, mesh_dim_names=axes)
        made["experts"] = experts["ep", "tp"] if shape.tp > 1 else experts["ep"]
        made["experts_fsdp"] = experts["dp_replicate", "efsdp"] if shape.dp_replicate > 1 else experts["efsdp"]
    return made

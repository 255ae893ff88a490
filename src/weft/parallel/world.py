"""The ranks of this run: who they are, which device is theirs, and the few things that all of them say together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.config.errors import UserError
from weft.config.mesh import AXES, MeshShape, ParallelSection, mesh_shape
from weft.parallel.rendezvous import COLLECTIVE_TIMEOUT, next_store

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
        """Whether it is the first of the ranks that share its rows."""
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

    @property
    def counts(self) -> bool:
        """Whether this rank speaks for all that have the same rows: its fellows on `pp`, `cp` and `tp`."""
        return self.place("pp") == self.place("cp") == self.place("tp") == 0

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
            if not self.counts:
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
        """Do `act` on all ranks (or on the first, whose result all get) and raise together what any of them raises.

        Without it, a rank that stops at a user's mistake leaves the others waiting, and N ranks say one thing N times.

        Raises:
            UserError: the first rank's, or with the number of the first rank that raised one; quiet on other ranks.
        """
        result, error = None, None
        if self.rank == 0 or not only_first:
            try:
                result = act()
            except UserError as mistake:
                error = mistake
        if self.ranks == 1:
            if error is not None:
                raise error
            return result  # type: ignore[return-value]
        told: list = [None] * self.ranks
        dist.all_gather_object(told, (str(error) if error else None, result if only_first else None))
        texts = {rank: text for rank, (text, _) in enumerate(told) if text is not None}
        if texts:
            rank, text = next(iter(texts.items()))
            together = UserError(text if rank == 0 else f"rank {rank}: {text}")
            together.quiet = self.rank != 0
            raise together
        return told[0][1] if only_first else result  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, on every rank."""
        if self.ranks == 1:
            return [value]
        told: list = [None] * self.ranks
        dist.all_gather_object(told, value)
        return told

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


def forget_groups() -> None:
    """Have DTensor plan anew: what it keeps of an earlier mesh of this process names groups that are gone."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    infos = getattr(_redistribute, "_gen_transform_infos", None)
    if infos is not None and hasattr(infos, "cache_clear"):
        infos.cache_clear()


def start_world(section: ParallelSection) -> World:
    """Join the process group that torchrun's environment names, or make one of a single process; build the mesh.

    Raises:
        UserError: the mesh does not fit the number of ranks.
    """
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    shape = mesh_shape(section, ranks)
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", 0))
        if local >= torch.cuda.device_count():
            raise UserError(
                f"local rank {local} has no GPU: this machine has {torch.cuda.device_count()}; lower --nproc to that"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
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
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
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
        made["tokens"] = mesh["dp_replicate", "dp_shard", "cp"]._flatten("tokens").get_group()
    if shape.ep > 1:
        axes = ("pp", "dp_replicate", "efsdp", "ep", "tp")
        sizes = (shape.pp, shape.dp_replicate, shape.fsdp // shape.ep, shape.ep, shape.tp)
        experts = init_device_mesh(device.type, sizes, mesh_dim_names=axes)
        made["experts"] = experts["ep", "tp"] if shape.tp > 1 else experts["ep"]
        made["experts_fsdp"] = experts["dp_replicate", "efsdp"] if shape.dp_replicate > 1 else experts["efsdp"]
    return made

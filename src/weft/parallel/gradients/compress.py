"""PowerSGD (Vogels et al., 2019): replicas all-reduce low-rank factors of their gradients.

FSDP2 reduces gradients within each replica. After the last backward, this module sums them over `dp_replicate`, the
axis that can have slow links, in a few large collectives. Let M be a matrix's gradient plus the error of the previous
step, summed over replicas. M is approximated as M ~ Q P^T with

    P = orthogonal(M^T Q), Q = M P

P is computed from the Q of the previous step (power iteration). A replica's error is the difference between its own
matrix and the approximation of this matrix; it is added to the replica's gradient in the next step. The formulas apply
to full (unsharded) matrices, so the result does not depend on how a replica is sharded nor, up to rounding, on the
number of replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from weft.config.mesh import CompressSection
from weft.models.layers.custom import derive_seed
from weft.parallel.local_parameters import local, shard_part
from weft.parallel.world import World

PREFIX = "compress."
_MIN_RATIO = 2  # a matrix is compressed if it has at least twice as many elements as its factors
_BUCKET = 2**24  # elements per exact all-reduce: 64 MiB in float32


@dataclass(frozen=True)
class _Matrix:
    """A parameter that is compressed: a matrix, or a stack of matrices in its last two dimensions.

    Attributes:
        placements: placements of Q. The last dimension of Q (the compression rank) is not sharded.
        p_groups: process groups within a replica over which the product P is partial, and must be summed.
        q_groups: process groups within a replica over which the product Q is partial, and must be summed.
        columns: the columns of the full matrix that are in this process's shard.
    """

    parameter: nn.Parameter
    placements: tuple
    p_groups: tuple[dist.ProcessGroup, ...]
    q_groups: tuple[dist.ProcessGroup, ...]
    columns: slice


class PowerSGD:
    """Sums gradients over the replicas of a model with PowerSGD.

    Args:
        section: the settings of `parallel.compress`.
        model: from `build_sharded_model`. FSDP2 reduces its gradients over all axes except `dp_replicate`.
        dtype: dtype of all-reduces without compression.
        seed: seed of the initial Q.

    Attributes:
        q: parameter name -> Q, a DTensor `[..., rows, rank]`; empty before the first compressed step.
        error: parameter name -> this replica's error, a DTensor like the parameter.
    """

    def __init__(self, section: CompressSection, model: nn.Module, world: World, *, dtype: torch.dtype, seed: int):
        self.rank, self.start, self.seed, self.dtype = section.rank, section.start_step, seed, dtype
        self.group = world.group("dp_replicate")
        self.replica, self.replicas = world.axis_rank("dp_replicate"), world.shape.dp_replicate
        self.trained: dict[str, Any] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.matrices = {name: _matrix(p) for name, p in self.trained.items() if compressible(p.shape, self.rank)}
        self.q: dict[str, Tensor] = {}
        self.error: dict[str, Tensor] = {}
        self.loaded: dict[str, Tensor] = {}

    @property
    def share(self) -> float:
        """The number of elements that replicas all-reduce, divided by the number of elements of all gradients."""
        total = sum(p.numel() for p in self.trained.values())
        matrices = [matrix.parameter for matrix in self.matrices.values()]
        return 1 - sum(p.numel() - factor_elements(p.shape, self.rank) for p in matrices) / total

    @torch.no_grad()
    def reduce(self, step: int) -> None:
        """Sums every gradient over the replicas in place, without compression in the first `start_step` steps.

        If a sum is not finite, sets the gradients of all compressed parameters to NaN on every replica, and does not
        change Q and errors.

        Args:
            step: number of optimizer updates so far.
        """
        gradients = {name: p.grad for name, p in self.trained.items() if p.grad is not None}
        matrices = {name: m for name, m in self.matrices.items() if name in gradients and step >= self.start}
        exact = [local(gradient) for name, gradient in gradients.items() if name not in matrices]
        self._reduce_exactly(exact)
        if not matrices:
            return
        for name in matrices.keys() - self.q.keys():
            self.q[name] = self._first_q(name)
            self.error[name] = torch.zeros_like(gradients[name])
        m = {name: local(gradients[name]).add_(local(self.error[name])) for name in matrices}  # [..., rows, columns]
        p = {name: self._partial_p(matrices[name], x, local(self.q[name])) for name, x in m.items()}
        _all_reduce(p, {name: matrix.p_groups for name, matrix in matrices.items()}, self.group)
        if not torch.stack([x.isfinite().all() for x in (*p.values(), *exact)]).all():
            for x in m.values():
                x.fill_(torch.nan)
            return
        p = {name: x[..., matrices[name].columns, :] for name, x in _orthogonal(p).items()}

        q = {name: x @ p[name] for name, x in m.items()}
        q_groups = {name: matrix.q_groups for name, matrix in matrices.items()}
        _all_reduce(q, q_groups, None)
        for name, x in m.items():
            torch.sub(x, q[name] @ p[name].mT, out=local(self.error[name]))
        _all_reduce(q, q_groups, self.group, within_replica=False)
        for name, x in q.items():
            local(self.q[name]).copy_(x)
            torch.matmul(x, p[name].mT, out=m[name])

    def _partial_p(self, matrix: _Matrix, m: Tensor, q: Tensor) -> Tensor:
        """Returns this process's partial P = M^T Q (before all-reduce), `[..., columns, r]`; r is the compression rank.

        A row of P belongs to a column of the full M. Rows are zero if the column is not in this process's shard of M.

        Args:
            m: this process's shard of its replica's matrix (gradient plus error).
            q: this process's shard of Q.
        """
        shape = (*m.shape[:-2], matrix.parameter.shape[-1], self.rank)
        p = torch.zeros(shape, dtype=m.dtype, device=m.device)
        p[..., matrix.columns, :] = m.mT @ q
        return p

    def _first_q(self, name: str) -> DTensor:
        """Returns the initial Q of a parameter: normal random numbers from the seed and the parameter's name."""
        parameter, generator = self.trained[name], torch.Generator()
        generator.manual_seed(derive_seed(self.seed, PREFIX + name))
        full = torch.randn((*parameter.shape[:-1], self.rank), generator=generator).to(parameter)
        placements = self.matrices[name].placements
        return distribute_tensor(full, parameter.device_mesh, placements, src_data_rank=None)

    def _reduce_exactly(self, gradients: list[Tensor]) -> None:
        bucket: list[Tensor] = []
        for number, gradient in enumerate(gradients, start=1):
            bucket.append(gradient)
            if sum(g.numel() for g in bucket) >= _BUCKET or number == len(gradients):
                flat = torch.cat([g.view(-1) for g in bucket]) if len(bucket) > 1 else gradient.view(-1)
                flat = flat.to(self.dtype)
                dist.all_reduce(flat, group=self.group)
                _unflatten(flat, bucket)
                bucket = []

    # ---- checkpoints

    def state(self) -> dict[str, Tensor]:
        """Returns name -> tensor to save in a checkpoint. The name of an error contains the index of its replica."""
        errors = {f"{PREFIX}error.{self.replica}.{name}": error for name, error in self.error.items()}
        return {**{f"{PREFIX}q.{name}": q for name, q in self.q.items()}, **errors}

    def blank_state(self, saved: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Returns name -> tensor to fill from a checkpoint. After the tensors are filled, call `use_loaded`.

        If the checkpoint has more replicas than this run, a replica loads the errors of several replicas, which
        `use_loaded` adds. If the checkpoint's compression rank differs, only errors are loaded.

        Args:
            saved: name -> shape of the tensors in the checkpoint.
        """
        blank: dict[str, Tensor] = {}
        for name, matrix in self.matrices.items():
            if saved.get(f"{PREFIX}q.{name}") == [*matrix.parameter.shape[:-1], self.rank]:
                blank[f"{PREFIX}q.{name}"] = self._first_q(name)
        replica = self.replica
        while any(f"{PREFIX}error.{replica}.{name}" in saved for name in self.matrices):
            for name, matrix in self.matrices.items():
                if (key := f"{PREFIX}error.{replica}.{name}") in saved:
                    blank[key] = torch.zeros_like(matrix.parameter.detach())
            replica += self.replicas
        self.loaded = blank
        return blank

    def use_loaded(self) -> None:
        """Sets Q and errors to the tensors that `blank_state` returned, which now have the checkpoint's values."""
        loaded, self.loaded = self.loaded, {}
        for name, matrix in self.matrices.items():
            q = loaded.get(f"{PREFIX}q.{name}")
            errors = [e for key, e in loaded.items() if key.startswith(f"{PREFIX}error.") and _parameter(key) == name]
            if q is not None or errors:
                self.q[name] = self._first_q(name) if q is None else q
                self.error[name] = sum(errors[1:], errors[0]) if errors else torch.zeros_like(matrix.parameter.detach())


def factor_elements(shape: Iterable[int], rank: int) -> int:
    """Returns the number of elements of P and Q together, for a parameter's shape and a compression rank."""
    *many, rows, columns = shape
    return rank * (rows + columns) * (many[0] if many else 1)


def compressible(shape: torch.Size, rank: int) -> bool:
    """Whether a tensor of this shape is a matrix or a stack of matrices, at least twice as large as P and Q together.

    Args:
        rank: the compression rank.
    """
    return 2 <= len(shape) <= 3 and factor_elements(shape, rank) * _MIN_RATIO <= shape.numel()


def _matrix(parameter: nn.Parameter) -> _Matrix:
    assert isinstance(parameter, DTensor)
    mesh, last = parameter.device_mesh, parameter.ndim - 1
    rows, columns, placements = [], [], []
    for axis, placement in enumerate(parameter.placements):
        dim = getattr(placement, "dim", None)  # `is_shard` is false for FSDP2's shards of tensors sharded over `tp`
        placements.append(Replicate() if dim == last else placement)
        if mesh.size(axis) > 1 and dim in (last - 1, last):
            (columns if dim == last else rows).append(mesh.get_group(axis))
    start, size = shard_part(parameter)
    return _Matrix(
        parameter,
        tuple(placements),
        p_groups=(*rows, *columns),
        q_groups=tuple(columns),
        columns=slice(start[last], start[last] + size[last]),
    )


def _all_reduce(
    tensors: dict[str, Tensor],
    groups: dict[str, tuple[dist.ProcessGroup, ...]],
    replicas: dist.ProcessGroup | None,
    within_replica: bool = True,
) -> None:
    """All-reduces tensors in place: first over process groups within a replica, then over the replicas.

    Tensors with the same groups share a buffer. Before the reduction over replicas, all ranks of a group have the same
    buffer. So each rank of the first group reduces only one slice of the buffer, and the ranks all-gather the reduced
    slices.

    Args:
        tensors: name -> tensor.
        groups: name -> process groups within a replica; () if there are none.
        replicas: process group over the replicas; None skips the reduction over replicas.
        within_replica: False skips the reduction over `groups`. All ranks of a group must then have equal tensors.
    """
    by_groups: dict[tuple, list[Tensor]] = defaultdict(list)
    for name, tensor in tensors.items():
        by_groups[groups[name]].append(tensor)
    for within, members in by_groups.items():
        flat = torch.cat([tensor.reshape(-1) for tensor in members])
        for group in within if within_replica else ():
            dist.all_reduce(flat, group=group)
        if replicas is not None and within:
            ranks = within[0].size()
            slices = list(nn.functional.pad(flat, (0, -flat.numel() % ranks)).chunk(ranks))
            own = slices[within[0].rank()].clone()
            dist.all_reduce(own, group=replicas)
            dist.all_gather(slices, own, group=within[0])
            flat = torch.cat(slices)[: flat.numel()]
        elif replicas is not None:
            dist.all_reduce(flat, group=replicas)
        _unflatten(flat, members)


def _unflatten(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _orthogonal(matrices: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns name -> P with orthonormal columns, by QR decomposition. Decomposes matrices of equal `size` together.

    Args:
        matrices: name -> P, `[..., size, rank]`; `rank` is the compression rank.
    """
    by_size: dict[int, list[str]] = defaultdict(list)
    for name, matrix in matrices.items():
        by_size[matrix.shape[-2]].append(name)
    done: dict[str, Tensor] = {}
    for size, names in by_size.items():
        stacked = torch.cat([matrices[name].reshape(-1, size, matrices[name].shape[-1]) for name in names])
        bases = torch.linalg.qr(stacked).Q.split([matrices[name].shape[:-2].numel() for name in names])
        done |= {name: basis.reshape(matrices[name].shape) for name, basis in zip(names, bases, strict=True)}
    return done


def _parameter(key: str) -> str:
    """Returns the parameter name from a checkpoint key `compress.error.<replica>.<parameter>`."""
    return key.removeprefix(f"{PREFIX}error.").partition(".")[2]

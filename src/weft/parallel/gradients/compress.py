"""PowerSGD (Vogels et al., 2019): replicas all-reduce low-rank factors of their gradients.

FSDP2 reduces gradients within each replica. The sum over `dp_replicate`, the axis that may have slow links, is computed
here after the last backward, in a few large collectives. A matrix M, the sum of all replicas' gradients and errors of
earlier steps, is approximated as M ~ Q P^T with

    P = orthogonal(M^T Q), Q = M P

Q is that of the previous step (power iteration). What Q P^T lacks of a replica's M is its error, and is added to its
next gradient. Matrices are full (unsharded) ones, so the result does not depend on how a replica is sharded nor, up to
rounding, on the number of replicas.
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
from weft.parallel.local_parameters import local
from weft.parallel.world import World
from weft.torch_private import compute_local_shape_and_global_offset

PREFIX = "compress."
_MIN_RATIO = 2  # a matrix is compressed if its factors have this many times fewer elements
_BUCKET = 2**24  # elements per exact all-reduce: 64 MiB in float32


@dataclass(frozen=True)
class _Matrix:
    """A parameter whose last two dimensions are approximated; dimensions before them count matrices.

    Attributes:
        placements: of Q, which has the parameter's dimensions except the last.
        p_groups, q_groups: process groups over whose shards P and Q are partial.
        columns: this rank's slice of the last dimension.
    """

    parameter: nn.Parameter
    placements: tuple
    p_groups: tuple[dist.ProcessGroup, ...]
    q_groups: tuple[dist.ProcessGroup, ...]
    columns: slice


class PowerSGD:
    """Reduces gradients over the replicas of a model.

    Args:
        model: from `build_sharded_model`; its gradients are reduced over all axes but `dp_replicate`.
        dtype: of exact all-reduces.
        seed: of the first Q.

    Attributes:
        q: by parameter name, a DTensor `[..., rows, rank]`; empty before the first compressed step.
        error: by parameter name, with its shape and placements: this replica's error.
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
        """Number of elements that are communicated, as a fraction of the gradient's."""
        total = sum(p.numel() for p in self.trained.values())
        matrices = [matrix.parameter for matrix in self.matrices.values()]
        return 1 - sum(p.numel() - factor_elements(p.shape, self.rank) for p in matrices) / total

    @torch.no_grad()
    def reduce(self, step: int) -> None:
        """Sums every gradient over the replicas, exactly in the first `start_step` steps.

        If the sum is not finite, some elements are NaN on every replica, and no state changes.

        Args:
            step: number of updates so far.
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
        """This rank's partial M^T Q, `[..., columns, rank]`, with zeros for columns that it lacks."""
        shape = (*m.shape[:-2], matrix.parameter.shape[-1], self.rank)
        p = torch.zeros(shape, dtype=m.dtype, device=m.device)
        p[..., matrix.columns, :] = m.mT @ q
        return p

    def _first_q(self, name: str) -> DTensor:
        """Normal random numbers, a function of the seed and the name."""
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
        """The state for a checkpoint. Names of errors have the replica's number."""
        errors = {f"{PREFIX}error.{self.replica}.{name}": error for name, error in self.error.items()}
        return {**{f"{PREFIX}q.{name}": q for name, q in self.q.items()}, **errors}

    def blank_state(self, saved: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Tensors to load a checkpoint into, before `use_loaded` is called.

        Args:
            saved: name -> shape of the checkpoint's tensors. If it has more replicas, each replica loads the errors of
                several; if its rank differs, only errors are loaded.
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
        """Sets the state from the tensors of `blank_state`, once they are loaded."""
        loaded, self.loaded = self.loaded, {}
        for name, matrix in self.matrices.items():
            q = loaded.get(f"{PREFIX}q.{name}")
            errors = [e for key, e in loaded.items() if key.startswith(f"{PREFIX}error.") and _parameter(key) == name]
            if q is not None or errors:
                self.q[name] = self._first_q(name) if q is None else q
                self.error[name] = sum(errors[1:], errors[0]) if errors else torch.zeros_like(matrix.parameter.detach())


def factor_elements(shape: Iterable[int], rank: int) -> int:
    """The number of elements in P and Q of a parameter."""
    *many, rows, columns = shape
    return rank * (rows + columns) * (many[0] if many else 1)


def compressible(shape: torch.Size, rank: int) -> bool:
    """Whether a parameter is a matrix, or a stack of them, and its factors are much smaller."""
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
    size, start = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
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
    """All-reduces in place, in one buffer for all with the same groups: within a replica, over replicas, or both.

    Ranks of a replica with equal buffers all-reduce a slice each over the replicas, and all-gather the slices.
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
    """An orthonormal basis of the columns, `[..., columns, rank]`, batched over matrices of one size."""
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
    """The parameter of `compress.error.<replica>.<parameter>`."""
    return key.removeprefix(f"{PREFIX}error.").partition(".")[2]

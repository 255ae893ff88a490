"""PowerSGD (Vogels et al., 2019): copies of a model tell one another low-rank factors of their gradients.

FSDP2 sums gradients inside of each copy. What is left is the sum over `dp_replicate`, the axis that may have slow
links, and that is done here after the last backward, in a few large collectives. A matrix M, the sum of all copies'
gradients and of what earlier steps have left out of theirs, is told as P and Q with M ~ Q P^T:

    P = orthogonal(M^T Q), Q = M P

Q is that of the step before (a power iteration that goes on from step to step), and what Q P^T lacks of a copy's M is
kept there and added to its next gradient. Matrices are whole ones, wherever their parts lie: what comes out does not
depend on how a copy is sharded, nor, but for rounding, on how many copies there are.
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
_WORTH = 2  # a matrix is told by its factors if they have so many times fewer numbers
_BUCKET = 2**24  # numbers that are summed at once: 64 MiB in float32


@dataclass(frozen=True)
class _Matrix:
    """A parameter whose last two dimensions are told by factors; dimensions before them count matrices.

    Attributes:
        placements: of Q, which has the parameter's dimensions but for the last one.
        sums_p, sums_q: groups of ranks over whose parts the products sum.
        columns: of the last dimension, this rank's part.
    """

    parameter: nn.Parameter
    placements: tuple
    sums_p: tuple[dist.ProcessGroup, ...]
    sums_q: tuple[dist.ProcessGroup, ...]
    columns: slice


class PowerSGD:
    """Sums gradients over the copies of a model.

    Args:
        model: from `build_sharded_model`: its gradients are summed over all axes but `dp_replicate`.
        dtype: that gradients are told in which are not compressed.
        seed: of the first Q.

    Attributes:
        q: by the parameter's name, a DTensor `[..., rows, rank]`; empty before the first compressed step.
        error: by the parameter's name, shaped and sharded as it: what this copy has not told yet.
    """

    def __init__(self, section: CompressSection, model: nn.Module, world: World, *, dtype: torch.dtype, seed: int):
        self.rank, self.start, self.seed, self.dtype = section.rank, section.start_step, seed, dtype
        self.copies, self.copy, self.number = (
            world.group("dp_replicate"),
            world.place("dp_replicate"),
            world.shape.dp_replicate,
        )
        self.trained: dict[str, Any] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.matrices = {name: _matrix(p) for name, p in self.trained.items() if worth(p.shape, self.rank)}
        self.q: dict[str, Tensor] = {}
        self.error: dict[str, Tensor] = {}
        self.filled: dict[str, Tensor] = {}

    @property
    def share(self) -> float:
        """Numbers that are told of the whole gradient, as a share of the gradient's."""
        every = sum(p.numel() for p in self.trained.values())
        saved = sum(p.numel() - factors(p.shape, self.rank) for p in (m.parameter for m in self.matrices.values()))
        return 1 - saved / every

    @torch.no_grad()
    def reduce(self, step: int) -> None:
        """Put the sum over the copies into every gradient, the same on all; `start_step` times exactly.

        Where it is not finite, some numbers are NaN on every copy, and nothing is kept for the next step.

        Args:
            step: updates made so far.
        """
        told = {name: p.grad for name, p in self.trained.items() if p.grad is not None}
        matrices = {name: m for name, m in self.matrices.items() if name in told and step >= self.start}
        exact = [local(gradient) for name, gradient in told.items() if name not in matrices]
        self._sum_exactly(exact)
        if not matrices:
            return
        for name in matrices.keys() - self.q.keys():
            self.q[name] = self._first_q(name)
            self.error[name] = torch.zeros_like(told[name])
        whole = {name: local(told[name]).add_(local(self.error[name])) for name in matrices}  # [..., rows, columns]
        p = {name: self._p(matrices[name], m, local(self.q[name])) for name, m in whole.items()}
        _sum(p, {name: m.sums_p for name, m in matrices.items()}, self.copies)
        if not torch.stack([part.isfinite().all() for part in (*p.values(), *exact)]).all():
            for m in whole.values():
                m.fill_(torch.nan)
            return
        p = {name: part[..., matrices[name].columns, :] for name, part in _orthogonal(p).items()}

        q = {name: m @ p[name] for name, m in whole.items()}
        _sum(q, {name: m.sums_q for name, m in matrices.items()}, None)
        for name, m in whole.items():
            torch.sub(m, q[name] @ p[name].mT, out=local(self.error[name]))
        _sum(q, {name: m.sums_q for name, m in matrices.items()}, self.copies, inside=False)
        for name, part in q.items():
            local(self.q[name]).copy_(part)
            torch.matmul(part, p[name].mT, out=whole[name])

    def _p(self, matrix: _Matrix, m: Tensor, q: Tensor) -> Tensor:
        """This rank's summand of M^T Q, `[..., columns, rank]`: rows of columns that it lacks are 0."""
        shape = (*m.shape[:-2], matrix.parameter.shape[-1], self.rank)
        p = torch.zeros(shape, dtype=m.dtype, device=m.device)
        p[..., matrix.columns, :] = m.mT @ q
        return p

    def _first_q(self, name: str) -> DTensor:
        """Normal random numbers, a function of the seed and the name."""
        parameter, generator = self.trained[name], torch.Generator()
        generator.manual_seed(derive_seed(self.seed, PREFIX + name))
        whole = torch.randn((*parameter.shape[:-1], self.rank), generator=generator).to(parameter)
        placements = self.matrices[name].placements
        return distribute_tensor(whole, parameter.device_mesh, placements, src_data_rank=None)

    def _sum_exactly(self, gradients: list[Tensor]) -> None:
        bucket: list[Tensor] = []
        for number, gradient in enumerate(gradients, start=1):
            bucket.append(gradient)
            if sum(g.numel() for g in bucket) >= _BUCKET or number == len(gradients):
                flat = torch.cat([g.view(-1) for g in bucket]) if len(bucket) > 1 else gradient.view(-1)
                flat = flat.to(self.dtype)
                dist.all_reduce(flat, group=self.copies)
                _put_back(flat, bucket)
                bucket = []

    # ---- what a checkpoint has of it

    def state(self) -> dict[str, Tensor]:
        """All that the next step depends on, by names that are this copy's own where the values are."""
        own = {f"{PREFIX}error.{self.copy}.{name}": error for name, error in self.error.items()}
        return {**{f"{PREFIX}q.{name}": q for name, q in self.q.items()}, **own}

    def blank_state(self, saved: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """What is to be filled from a checkpoint before `restored` is called.

        Args:
            saved: its tensors' names -> shapes. Of another number of copies, each takes some others' errors as well; of
                another rank, only these are taken.
        """
        blank: dict[str, Tensor] = {}
        for name, matrix in self.matrices.items():
            if saved.get(f"{PREFIX}q.{name}") == [*matrix.parameter.shape[:-1], self.rank]:
                blank[f"{PREFIX}q.{name}"] = self._first_q(name)
        copy = self.copy
        while any(f"{PREFIX}error.{copy}.{name}" in saved for name in self.matrices):
            for name, matrix in self.matrices.items():
                if (key := f"{PREFIX}error.{copy}.{name}") in saved:
                    blank[key] = torch.zeros_like(matrix.parameter.detach())
            copy += self.number
        self.filled = blank
        return blank

    def restored(self) -> None:
        """Go on from what was filled in."""
        filled, self.filled = self.filled, {}
        for name, matrix in self.matrices.items():
            q = filled.get(f"{PREFIX}q.{name}")
            errors = [e for key, e in filled.items() if key.startswith(f"{PREFIX}error.") and _name(key) == name]
            if q is not None or errors:
                self.q[name] = self._first_q(name) if q is None else q
                self.error[name] = sum(errors[1:], errors[0]) if errors else torch.zeros_like(matrix.parameter.detach())


def factors(shape: Iterable[int], rank: int) -> int:
    """The numbers in P and Q of a parameter of this shape."""
    *many, rows, columns = shape
    return rank * (rows + columns) * (many[0] if many else 1)


def worth(shape: torch.Size, rank: int) -> bool:
    """Whether a parameter is a matrix, or a stack of them, that has many more numbers than its factors."""
    return 2 <= len(shape) <= 3 and factors(shape, rank) * _WORTH <= shape.numel()


def _matrix(parameter: nn.Parameter) -> _Matrix:
    assert isinstance(parameter, DTensor)
    mesh, last = parameter.device_mesh, parameter.ndim - 1
    rows, columns, placements = [], [], []
    for axis, placement in enumerate(parameter.placements):
        cut = getattr(placement, "dim", None)  # `is_shard` does not know FSDP2's shards of what is cut over `tp`
        placements.append(Replicate() if cut == last else placement)
        if mesh.size(axis) > 1 and cut in (last - 1, last):
            (columns if cut == last else rows).append(mesh.get_group(axis))
    size, start = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
    return _Matrix(
        parameter,
        tuple(placements),
        sums_p=(*rows, *columns),
        sums_q=tuple(columns),
        columns=slice(start[last], start[last] + size[last]),
    )


def _sum(
    parts: dict[str, Tensor],
    groups: dict[str, tuple[dist.ProcessGroup, ...]],
    copies: dist.ProcessGroup | None,
    inside: bool = True,
) -> None:
    """Sum in place, in one buffer for all with the same groups: inside of a copy, over the copies, or both.

    Ranks of a copy that know the same tell the other copies different pieces of it.
    """
    alike: dict[tuple, list[Tensor]] = defaultdict(list)
    for name, part in parts.items():
        alike[groups[name]].append(part)
    for within, some in alike.items():
        flat = torch.cat([part.reshape(-1) for part in some])
        for group in within if inside else ():
            dist.all_reduce(flat, group=group)
        if copies is not None and within:
            pieces = list(_padded(flat, within[0].size()).chunk(within[0].size()))
            own = pieces[within[0].rank()].clone()
            dist.all_reduce(own, group=copies)
            dist.all_gather(pieces, own, group=within[0])
            flat = torch.cat(pieces)[: flat.numel()]
        elif copies is not None:
            dist.all_reduce(flat, group=copies)
        _put_back(flat, some)


def _padded(flat: Tensor, ranks: int) -> Tensor:
    return nn.functional.pad(flat, (0, -flat.numel() % ranks))


def _put_back(flat: Tensor, parts: list[Tensor]) -> None:
    for part, summed in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(summed.view(part.shape))


def _orthogonal(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Orthonormal columns that span the same: `[..., columns, rank]`. Matrices of one size are done together."""
    alike: dict[int, list[str]] = defaultdict(list)
    for name, part in parts.items():
        alike[part.shape[-2]].append(name)
    done: dict[str, Tensor] = {}
    for size, names in alike.items():
        stacked = torch.cat([parts[name].reshape(-1, size, parts[name].shape[-1]) for name in names])
        orthonormal = torch.linalg.qr(stacked).Q.split([parts[name].shape[:-2].numel() for name in names])
        done |= {name: q.reshape(parts[name].shape) for name, q in zip(names, orthonormal, strict=True)}
    return done


def _name(key: str) -> str:
    """The parameter's, of `compress.error.<copy>.<parameter>`."""
    return key.removeprefix(f"{PREFIX}error.").partition(".")[2]

"""Records what operators on DTensors do: redistributions, arithmetic and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils.flop_counter import flop_registry

from weft.planner.parallelize.graph import Meta
from weft.planner.parallelize.torch_private import propagating, recorded_redistribution
from weft.torch_private import TorchDispatchMode, tree_leaves

Placed = tuple[Placement, ...]  # one placement for each axis


class Move(NamedTuple):
    """A redistribution of a tensor."""

    meta: Meta
    source: Placed
    target: Placed


@dataclass
class Work:
    """What one rank of the mesh of trials computes.

    Attributes:
        flops: operations of matrix products.
        products: number of matrix products.
        bytes: bytes that operators read and write.
        calls: number of operators that are started.
        moves: redistributions.
    """

    flops: float = 0.0
    products: int = 0
    bytes: float = 0.0
    calls: int = 0
    moves: list[Move] = field(default_factory=list)


_FREE = {
    getattr(torch.ops.aten, name) for name in ("empty_strided", "empty", "empty_like", "detach", "alias", "expand")
}


class _Counter(TorchDispatchMode):
    """Counts arithmetic and bytes of the operators on local tensors."""

    def __init__(self, work: Work):
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if propagating:
            return out
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.work.flops += formula(*args, **(kwargs or {}), out_val=out)
            self.work.products += 1
        if not func.is_view and func.overloadpacket not in _FREE:
            leaves = tree_leaves((args, kwargs, out))
            self.work.bytes += sum(one.numel() * one.itemsize for one in leaves if isinstance(one, torch.Tensor))
            self.work.calls += 1
        return out


@contextmanager
def watch() -> Iterator[Work]:
    """Context that records the work of operators on DTensors; redistributions have no data and no process group."""
    work = Work()

    def record(meta: Any, source: Sequence[Placement], target: Sequence[Placement]) -> None:
        start, end = _readable(source), _readable(target)
        if start != end:
            work.moves.append(Move(Meta(tuple(meta.shape), meta.dtype), start, end))

    with recorded_redistribution(record), _Counter(work):
        yield work


def _readable(placements: Sequence[Placement]) -> Placed:
    return tuple(
        one
        if type(one) in (Shard, Replicate, Partial)
        else Partial()
        if isinstance(one, Partial)
        else Shard(getattr(one, "dim", 0))
        for one in placements
    )

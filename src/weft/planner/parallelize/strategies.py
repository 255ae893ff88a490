"""Finds what DTensor does with an operator for given placements of its inputs, by trying it.

A trial runs the operator, forward and backward, on DTensors whose local tensors have no data, on a mesh of two ranks
without process groups. It records placements of results and gradients, redistributions, arithmetic and bytes. Sizes of
the real mesh enter only when a trial is priced, so one trial serves all meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from weft.planner.compute import BACKWARD_ATTENTION
from weft.planner.parallelize.custom_operations import Custom, without_data
from weft.planner.parallelize.functions import Functions
from weft.planner.parallelize.graph import Meta, Node, Ref
from weft.planner.parallelize.operation_hooks import run_by
from weft.planner.parallelize.torch_private import (
    mesh_without_processes,
    replicate_what_has_no_rule,
)
from weft.planner.parallelize.watch import Move, Placed, Work, watch
from weft.torch_private import storage_of, tree_map_only

Sums = tuple[bool, ...]  # for each axis, whether a gradient is a partial sum
AXES = ("tp",)
TRIED = 2  # ranks of the mesh of trials

Placings = tuple[Placed, ...]


class State(NamedTuple):
    """How a tensor is placed.

    Attributes:
        forward: the placement on each axis.
        partial: for each axis, whether the gradient of a replicated tensor is a partial sum there.
    """

    forward: Placed
    partial: tuple[bool, ...] = (False,)


@dataclass
class Trial:
    """The result of a trial of one operator.

    Attributes:
        outputs: the placement of each output; None for an output that is no tensor.
        work: of the forward pass.
        saved: numbers of the inputs that autograd saves.
        saved_outputs: numbers of the outputs that autograd saves.
        extra: bytes of other tensors that autograd saves.
        inputs: the inputs of the trial.
        results: the outputs of the trial.
        fused: whether the operator is attention.
        stood_in: whether a custom operation did not run, because it needs data.
    """

    outputs: tuple[Placed | None, ...]
    work: Work
    saved: frozenset[int]
    saved_outputs: frozenset[int]
    extra: float
    inputs: list[DTensor]
    results: tuple[Any, ...]
    fused: bool = False
    stood_in: bool = False


def normal(placed: Placed) -> Placed:
    """Returns the placement of a gradient of a tensor: that of the tensor; replicated where the tensor is a sum."""
    return tuple(one if isinstance(one, Shard) else Replicate() for one in placed)


def plain(placements: Sequence[Placement]) -> Placed | None:
    """Returns placements in which masked sums count as sums; None if there are strided shards."""
    found: list[Placement] = []
    for one in placements:
        if type(one) is Shard or type(one) is Replicate:
            found.append(one)
        elif isinstance(one, Partial):
            found.append(one if type(one) is Partial else Partial())
        else:
            return None
    return tuple(found)


def fits(meta: Meta, placed: Placed, ranks: int) -> bool:
    """Whether `ranks` divides the dimension of a tensor that is sharded."""
    return all(
        not isinstance(one, Shard) or (one.dim < len(meta.shape) and meta.shape[one.dim] % ranks == 0) for one in placed
    )


class Trials:
    """Runs operators on meta tensors and remembers the results."""

    def __init__(self) -> None:
        replicate_what_has_no_rule()
        # Its name differs from those of real meshes: DTensor remembers results for equal meshes, with their groups.
        self.mesh = mesh_without_processes(TRIED, "trial")
        self.mode = Functions(self.mesh)
        self.known: dict[Any, Trial | None] = {}
        self.backwards: dict[Any, tuple[tuple[Sums, ...], Work] | None] = {}
        self.errors: dict[Any, str] = {}
        self.runs: dict[Custom, bool] = {}  # custom operations: whether they run without data

    def place(self, meta: Meta, placed: Placed, trained: bool) -> DTensor:
        """Returns a DTensor without data."""
        shape = list(meta.shape)
        for one in placed:
            if isinstance(one, Shard):
                shape[one.dim] //= TRIED
        local = torch.empty(shape, dtype=meta.dtype, device="meta")
        strides = torch.empty(meta.shape, device="meta").stride()
        whole = DTensor.from_local(
            local, self.mesh, placed, run_check=False, shape=torch.Size(meta.shape), stride=strides
        )
        leaf: Any = whole.detach().requires_grad_(trained and meta.dtype.is_floating_point)
        return leaf

    def forward(self, key: Any, node: Node, tensors: Sequence[tuple[Meta, bool]], placed: Placings) -> Trial | None:
        """Tries the forward pass of an operator; None if DTensor cannot run it with these placements.

        Args:
            key: identifies operator and tensors.
            tensors: shape and dtype of each input, and whether it has a gradient.
            placed: the placements of each input.
        """
        full = (key, placed)
        if full not in self.known:
            try:
                self.known[full] = self._forward(node, tensors, placed)
            except Exception as error:  # any error means: not this way; `errors` keeps the reason
                self.errors[key] = f"{_first_line(error)}"
                self.known[full] = None
        return self.known[full]

    def _forward(self, node: Node, tensors: Sequence[tuple[Meta, bool]], placed: Placings) -> Trial | None:
        given = [self.place(meta, one, trained) for (meta, trained), one in zip(tensors, placed, strict=True)]
        remaining = iter(given)
        args, kwargs = tree_map_only(Ref, lambda _: next(remaining), (node.args, node.kwargs))
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("meta"), (args, kwargs))
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        stand_in = self._stand_in(node, tensors)

        saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one)
        with watch() as work, saving, self.mode, run_by(stand_in):
            out = function_of(node.target)(*args, **kwargs)
        results = tuple(out) if isinstance(out, tuple | list) else (out,)
        found: list[Placed | None] = []
        for one in results:
            if not isinstance(one, DTensor):
                found.append(tuple(Replicate() for _ in AXES) if isinstance(one, torch.Tensor) else None)
                continue
            placements = plain(one.placements)
            if placements is None:
                return None
            found.append(placements)
        trial = Trial(tuple(found), work, frozenset(), frozenset(), 0.0, given, results)
        if stand_in is not None:
            locals_of = [one.to_local() for one in (*given, *results) if isinstance(one, DTensor)]
            work.bytes, work.calls = sum(one.numel() * one.itemsize for one in locals_of), 1
            trial.stood_in = True
        _note_saved(trial, saved)
        if str(node.target) == ATTENTION:
            _fuse(trial, causal=bool(kwargs.get("is_causal", args[5] if len(args) > 5 else False)))
        return trial

    def _stand_in(self, node: Node, tensors: Sequence[tuple[Meta, bool]]) -> Callable | None:
        """Returns what runs for a custom operation that does not run without data; None if it does, or for others."""
        if not isinstance(node.target, Custom):
            return None
        if node.target not in self.runs:
            given = [
                torch.empty(meta.shape, dtype=meta.dtype, device="meta", requires_grad=meta.dtype.is_floating_point)
                for meta, _ in tensors
            ]
            remaining = iter(given)
            args, kwargs = tree_map_only(Ref, lambda _: next(remaining), (node.args, node.kwargs))
            try:
                out = node.target(*args, **kwargs)
                leaves = [one for one in (out if isinstance(out, tuple | list) else [out]) if one.requires_grad]
                torch.autograd.backward(leaves, [torch.empty_like(one) for one in leaves])
                self.runs[node.target] = True
            except Exception:  # any error: the operation needs data
                self.runs[node.target] = False
        return None if self.runs[node.target] else without_data(node.outputs)

    def backward(
        self, key: Any, trial: Trial, partial: tuple[Sums | None, ...]
    ) -> tuple[tuple[Sums, ...], Work] | None:
        """Tries the backward pass of a trial.

        Args:
            partial: for each output, on which axes its gradient is a partial sum.

        Returns:
            For each input, on which axes its gradient is a partial sum; and the work. None if backward fails.
        """
        full = (key, partial)
        if full not in self.backwards:
            try:
                self.backwards[full] = self._backward(trial, partial)
            except Exception as error:  # see forward
                self.errors[key[0]] = f"backward: {_first_line(error)}"
                self.backwards[full] = None
        return self.backwards[full]

    def _backward(self, trial: Trial, partial: tuple[Sums | None, ...]) -> tuple[tuple[Sums, ...], Work]:
        nothing = tuple(False for _ in AXES)
        wanted = [one for one in trial.inputs if one.requires_grad]
        outs, grads = [], []
        for result, placed, sums in zip(trial.results, trial.outputs, partial, strict=True):
            if isinstance(result, torch.Tensor) and result.requires_grad and placed is not None:
                gradient = tuple(
                    Partial() if some else one for one, some in zip(normal(placed), sums or nothing, strict=True)
                )
                outs.append(result)
                grads.append(self.place(Meta(tuple(result.shape), result.dtype), gradient, False))
        if not wanted or not outs:
            return tuple(nothing for _ in trial.inputs), Work()
        with watch() as work:
            found = iter(torch.autograd.grad(outs, wanted, grads, retain_graph=True, allow_unused=True))
        found_sums: list[Sums] = []
        for one in trial.inputs:
            gradient = next(found) if one.requires_grad else None
            if not isinstance(gradient, DTensor):
                found_sums.append(nothing)
                continue
            usual, got = normal(one.placements), plain(gradient.placements) or normal(one.placements)
            flags = tuple(
                isinstance(want, Replicate) and isinstance(have, Partial) for want, have in zip(usual, got, strict=True)
            )
            target = tuple(have if some else want for want, have, some in zip(usual, got, flags, strict=True))
            if target != got:
                work.moves.append(Move(Meta(tuple(gradient.shape), gradient.dtype), got, target))
            found_sums.append(flags)
        if trial.stood_in:
            work.bytes, work.calls = 2 * trial.work.bytes, 1
        if trial.fused:
            work.bytes = 2 * trial.work.bytes
            work.flops, work.products = trial.work.flops * BACKWARD_ATTENTION, 5
        return tuple(found_sums), work


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def _storage(value: Any) -> int:
    return storage_of(value.to_local() if isinstance(value, DTensor) else value)


def _note_saved(trial: Trial, saved: Sequence[torch.Tensor]) -> None:
    """Notes which tensors autograd saved: inputs, outputs, or others."""
    kept = {_storage(one): one for one in saved}
    outputs = [isinstance(one, torch.Tensor) and _storage(one) in kept for one in trial.results]
    inputs = {place: _storage(one) for place, one in enumerate(trial.inputs)}
    trial.saved = frozenset(place for place, storage in inputs.items() if storage in kept)
    known = set(inputs.values())
    trial.saved_outputs = frozenset(
        place for place, one in enumerate(trial.results) if outputs[place] and _storage(one) not in known
    )
    known |= {_storage(one) for one in trial.results if isinstance(one, torch.Tensor)}
    others = [
        one.to_local() if isinstance(one, DTensor) else one for storage, one in kept.items() if storage not in known
    ]
    trial.extra = sum(one.numel() * one.itemsize for one in others)


def _fuse(trial: Trial, *, causal: bool) -> None:
    """Counts attention as the fused kernels do: no matrix of scores in memory; half of the products where causal."""
    tensors = [*trial.inputs, *(one for one in trial.results if isinstance(one, DTensor))]
    trial.work.bytes = sum(one.to_local().numel() * one.itemsize for one in tensors)
    trial.work.flops *= 0.5 if causal else 1.0
    trial.saved, trial.saved_outputs, trial.extra = frozenset(range(len(trial.inputs))), frozenset([0]), 0.0
    trial.fused = True


ATTENTION = "aten.scaled_dot_product_attention.default"
_FUNCTIONS: dict[str, Any] = {
    ATTENTION: F.scaled_dot_product_attention,
    "aten.dropout.default": torch.dropout,
}
_FUNCTIONS |= {
    f"aten.{name}.{overload}": getattr(torch, name)
    for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    for overload in ("default", "input", "padding")
}


def function_of(target: Any) -> Callable:
    """Returns the function that a model calls for an operator of the graph, where the runtime replaces the function."""
    return _FUNCTIONS.get(str(target), target)

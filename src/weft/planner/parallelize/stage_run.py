"""Runs a module in pipeline stages: each rank of the axis `pp` has some of the parameters, and runs a schedule.

The call of the module returns the loss of the batch: the mean of the losses of its micro-batches, which have equal
numbers of rows. The call runs forward and backward passes in the order of a schedule of
`torch.distributed.pipelining`, and keeps the gradients until `loss.backward()`.

Within a stage, tensors are DTensors on the mesh of the stage, as without stages. Parameters are gathered over `dp` once
in a call, and their gradients are reduced once (as ZeRO-1 does; Rajbhandari et al., 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from weft.errors import UserError
from weft.planner.parallelize.containers import batch_rows, map_tensors
from weft.planner.parallelize.mesh import mesh_of, mesh_text
from weft.planner.parallelize.runtime import Runtime, full_over_dp, wrap
from weft.planner.parallelize.stage_calls import Begin, Finish, StageCalls, draw_seed, rows_of_micro_batch, stage_seed
from weft.planner.parallelize.stage_follow import Player, Trace
from weft.planner.parallelize.stage_table import Stages, covers
from weft.planner.parallelize.torch_private import tree_map


class StagedRuntime(Runtime):
    """The tables of a plan with stages, which `apply` carries out on a module.

    Args:
        stages: the stages.
        sizes: name of an axis of a stage's mesh -> number of ranks.
        mesh: the devices, or None for all ranks.
        loss: outputs -> loss; None if the module returns its loss.
        tables: see `Runtime`.

    Attributes:
        aliases: name of a parameter -> all names of the parameter, which may be tied.
        owners: parameter -> the ranks of the axis `pp` that have it.
        tied: the parameters of this rank that others of `owners` have too, with the process group of these ranks.
        full: during a call: parameter -> the parameter, gathered over `dp` in the dtype of the computation.
        held: during a call: parameter -> the leaf whose gradient is the sum of those of `full`, not yet reduced.
    """

    def __init__(
        self,
        stages: Stages,
        sizes: Mapping[str, int],
        mesh: DeviceMesh | None,
        loss: Callable[..., torch.Tensor] | None,
        **tables: Any,
    ):
        pp, each = stages.pp, math.prod(sizes.values())
        if mesh is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            ranks = torch.arange(dist.get_world_size())
        else:
            device, ranks = mesh.device_type, mesh.mesh.flatten()
        if ranks.numel() != pp * each:
            text = f"pp {pp} x {mesh_text(sizes)}"
            raise UserError(f"the plan is for {pp * each} devices ({text}), and there are {ranks.numel()}")
        ranks = ranks.view(pp, each)
        self.whole = DeviceMesh(device, ranks, mesh_dim_names=("pp", "stage"))
        self.meshes = [mesh_of(sizes, DeviceMesh(device, ranks[rank], mesh_dim_names=("stage",))) for rank in range(pp)]
        self.group, self.rank = self.whole.get_group("pp"), self.whole.get_local_rank("pp")
        super().__init__(self.meshes[self.rank], **tables)
        self.stages, self.loss = stages, loss
        self.device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        self.forwards: dict[str, Callable] = {}
        self.held: dict[Any, torch.Tensor] = {}
        self.full: dict[Any, torch.Tensor] = {}
        self.calls: dict[Any, StageCalls] = {}
        self.player: Player | None = None

    def apply(
        self,
        model: nn.Module,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        without_data: bool = False,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Makes a module run in stages; see `Runtime.apply`."""
        if without_data:
            self.device = torch.device("meta")
        self.model = model
        self.stages.check(model, self.recompute)
        self.aliases = _aliases(model)
        super().apply(model, state_dict, without_data, dtype)
        self.owners = {parameter: self._owners(name) for name, parameter in model.named_parameters()}
        self.tied = self._tied_parameters(self.whole.mesh)
        return model

    def _tied_parameters(self, ranks: torch.Tensor) -> list[tuple[Any, dist.ProcessGroup]]:
        """Returns the parameters of this rank that other stages have too, with the groups of ranks that have them."""
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        found = []
        for parameter, owners in ((one, tuple(owners)) for one, owners in self.owners.items()):
            if len(owners) < 2:
                continue
            if owners not in groups:
                for place in range(ranks.shape[1]):  # all ranks make all groups
                    group = dist.new_group(ranks[list(owners), place].tolist())
                    if self.whole.get_local_rank("stage") == place and self.rank in owners:
                        groups[owners] = cast(dist.ProcessGroup, group)
                groups.setdefault(owners, cast(dist.ProcessGroup, None))
            if self.rank in owners:
                found.append((parameter, groups[owners]))
        return found

    # ---- parameters

    def _owners(self, name: str) -> list[int]:
        """Returns the ranks of the axis `pp` that have a parameter, under all names of the parameter."""
        names = self.aliases.get(name, [name])
        return sorted({rank for one in names for rank in self.stages.ranks_of(one) if self._named(one)} or {0})

    def _named(self, name: str) -> bool:
        return any(covers(one, name) for names in self.stages.owns for one in names)

    def _stored(self, name: str, shape: Sequence[int]) -> tuple[DeviceMesh, list[Placement]]:
        owners = self._owners(name)
        _, placements = super()._stored(name, shape)
        return self.meshes[self.rank if self.rank in owners else owners[0]], placements

    def gather(self, parameter: Any) -> Any:
        """Returns a parameter of this rank, as gathered for this call; others as they are."""
        if not isinstance(parameter, DTensor) or parameter not in self.held:
            return parameter
        return Gathered.apply(self.held[parameter], self.full[parameter])

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Context of a call: parameters are gathered over `dp`, and have no gradient."""
        before = []
        for parameter in self.model.parameters():
            if isinstance(parameter, DTensor) and parameter.device_mesh == self.mesh:
                self.full[parameter] = full_over_dp(cast(DTensor, parameter.detach()), self.mode.dtype)
                self.held[parameter] = parameter.detach().requires_grad_(parameter.requires_grad)
                before.append((parameter, parameter.grad))
                parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient
            self.held, self.full = {}, {}

    def _gradients(self) -> tuple[list[Any], list[torch.Tensor]]:
        """Returns the parameters that have gradients in this call, and these gradients, placed as the parameters."""
        found: dict[Any, torch.Tensor] = {}
        for parameter, leaf in self.held.items():
            parts = [one for one in (leaf.grad, parameter.grad) if one is not None]
            for one in parts:
                reduced = cast(DTensor, one).redistribute(placements=parameter.placements)
                found[parameter] = found[parameter] + reduced if parameter in found else reduced
        for parameter, group in self.tied:
            if parameter.requires_grad:
                own = found.setdefault(parameter, torch.zeros_like(parameter).detach())
                dist.all_reduce(cast(DTensor, own).to_local(), group=group)
        return list(found), list(found.values())

    # ---- modules

    def _wrap(self, name: str, module: nn.Module) -> None:
        self.forwards[name] = module.forward
        wrap(module, self._own_forward)
        super()._wrap(name, module)

        def call(forward: Callable, *args: Any, **kwargs: Any) -> Any:
            if self.player is None:  # computed again in backward
                return forward(*args, **kwargs)
            return self.player.module(name, module, forward, args, kwargs)

        wrap(module, call)

    def _own_forward(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.player is None:
            return forward(*args, **kwargs)
        with self.player.runtime(quiet=False):
            return forward(*args, **kwargs)

    def _convert(self, forward: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs a call of the module: all micro-batches, in the order of the schedule. Returns the loss."""
        rows, count = batch_rows((args, kwargs)), self.stages.micro_batches
        if rows is None or rows % count:
            raise UserError(
                f"the batch has {rows} rows, which are not {count} equal micro-batches; give a multiple of {count} "
                "rows, or change MICRO_BATCHES in the plan"
            )
        parts = [map_tensors(rows_of_micro_batch(rows, count, number), (args, kwargs)) for number in range(count)]
        losses: dict[int, torch.Tensor] = {}

        def finish(number: int, out: torch.Tensor) -> torch.Tensor:
            loss = (out.full_tensor() if isinstance(out, DTensor) else out) / count
            losses[number] = loss.detach()
            return loss

        seed = draw_seed()

        def begin(stage: int, number: int) -> None:
            torch.manual_seed(stage_seed(seed, stage, number))

        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            trace, parameters, gradients = self.run(parts, begin, finish)
        zero = torch.zeros((), dtype=trace.dtype, device=self.device)
        loss = sum((losses[number] for number in sorted(losses)), start=zero)
        dist.broadcast(loss, group=self.group, group_src=self.last)
        return HandOver.apply(loss.requires_grad_(), gradients, *parameters) if torch.is_grad_enabled() else loss

    def run(
        self, micro_batches: Sequence[Any], begin: Begin, finish: Finish, *, returns_loss: bool = True
    ) -> tuple[Trace, list[Any], list[torch.Tensor]]:
        """Runs forward and backward passes of micro-batches in the order of the schedule; without gradients, forward.

        Args:
            micro_batches: positional and keyword arguments of the module, of equal shapes, for each micro-batch.
            begin: called before a stage runs a micro-batch, to seed random numbers.
            finish: called on the ranks of the last stage with the outputs of a micro-batch as DTensors; returns its
                loss, from which backward begins.
            returns_loss: whether the outputs must be a loss.

        Returns:
            The trace, the parameters of this rank that have gradients, and these gradients.
        """
        inputs = [self._sharded_inputs(self._all_rows(one), *one) for one in micro_batches]
        count, graded = len(inputs), torch.is_grad_enabled()
        key = _signature(inputs[0]), count, self.model.training, graded, returns_loss
        if key not in self.calls:
            self.calls[key] = StageCalls(self, count, self._all_rows(micro_batches[0]), *inputs[0], returns_loss)
        call = self.calls[key]
        with self._holding():
            call.run(inputs, begin, finish)
            parameters, gradients = self._gradients() if graded else ([], [])
        buffers = dict(self.model.named_buffers())
        for name, stage in sorted(call.trace.written.items()):
            dist.broadcast(buffers[name], group=self.group, group_src=self.stages.rank_of(stage))
        return call.trace, parameters, gradients

    @property
    def last(self) -> int:
        """The rank of the axis `pp` that runs the last stage."""
        return self.stages.rank_of(len(self.stages.begins) - 1)

    def _all_rows(self, call: Any) -> int:
        rows = batch_rows(call) or 0
        return rows * self.dp if "inputs" in self.local else rows


class Gathered(torch.autograd.Function):
    """A gathered parameter, as a function of a leaf in the parameter's dtype.

    So the gradients of micro-batches are summed in that dtype, also by schedules that split backward passes: these add
    to `.grad` of leaves without running their hooks.
    """

    @staticmethod
    def forward(ctx: Any, leaf: DTensor, full: DTensor) -> torch.Tensor:  # type: ignore[override]
        """Returns the gathered parameter."""
        ctx.dtype = leaf.dtype
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        """Returns the gradient in the dtype of the leaf; it is reduced after the last micro-batch."""
        return gradient.to(ctx.dtype), None


class HandOver(torch.autograd.Function):
    """The loss of a call; in backward, hands over the gradients that the schedule computed."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, gradients: list[DTensor], *parameters: Any) -> torch.Tensor:  # type: ignore[override]
        """Returns the loss."""
        ctx.gradients = gradients
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> Any:  # type: ignore[override]
        """Returns the stored gradients, scaled by the gradient of the loss."""
        return None, None, *(_scaled(one, scale) for one in ctx.gradients)


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    by_tensor: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(parameter, []).append(name)
    return {name: names for names in by_tensor.values() for name in names}


def _scaled(one: DTensor, scale: torch.Tensor) -> DTensor:
    local = one.to_local() * scale.to(one.dtype)
    return DTensor.from_local(
        local, one.device_mesh, one.placements, run_check=False, shape=one.shape, stride=one.stride()
    )


def _signature(inputs: Any) -> str:
    """Returns shapes and dtypes of tensors, names of functions, and all other values."""

    def name(one: Any) -> Any:
        inner = getattr(one, "func", one)  # of a `partial`
        return getattr(inner, "__qualname__", type(inner).__qualname__) if callable(one) else one

    described = map_tensors(lambda one: (tuple(one.shape), str(one.dtype), str(one.device)), inputs)
    return str(tree_map(name, described))  # a new function of each call would have another address

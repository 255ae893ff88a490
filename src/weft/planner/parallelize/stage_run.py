"""Runs a module in pipeline stages: each rank of the axis `pp` has some of the parameters, and runs a schedule.

The call of the module returns the loss of the batch: the mean of the losses of its micro-batches, which have equal
numbers of rows. The call runs forward and backward passes in the order of a schedule of
`torch.distributed.pipelining`, and keeps the gradients until `loss.backward()`.

Within a stage, tensors are DTensors on the mesh of the stage, as without stages. Parameters are gathered over `dp` once
in a call, and their gradients are reduced once (as ZeRO-1 does; Rajbhandari et al., 2020).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from weft.errors import UserError
from weft.planner.parallelize.axes import placements_on
from weft.planner.parallelize.containers import batch_rows, map_tensors
from weft.planner.parallelize.mesh import mesh_of
from weft.planner.parallelize.runtime import Runtime, full_over_dp, match, wrap
from weft.planner.parallelize.stage_trace import EndOfStage, Player, Trace, trace_stages

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # schedules with two stages on a rank: one from the front, one from the end
ONE_STAGE = ("GPipe", "1F1B")  # schedules with one stage on a rank
SEVERAL_STAGES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")


@dataclass(frozen=True)
class Stages:
    """The stages of a plan.

    Attributes:
        pp: number of ranks of the pipeline axis.
        begins: names of the modules with whose call stages begin; the first is "".
        owns: for each stage, names of modules and parameters: the stage has their parameters. `h.0..3` stands for
            `h.0`, `h.1`, `h.2` and `h.3`.
        schedule: name of a schedule of `torch.distributed.pipelining`.
        micro_batches: number of micro-batches of a call.
    """

    pp: int
    begins: Sequence[str]
    owns: Sequence[Sequence[str]]
    schedule: str
    micro_batches: int

    def rank_of(self, stage: int) -> int:
        """Returns the rank of the axis `pp` that runs a stage."""
        if self.schedule in V_SHAPED:
            return min(stage, 2 * self.pp - 1 - stage)
        return stage % self.pp

    def stages_of(self, rank: int) -> list[int]:
        """Returns the stages that a rank of the axis `pp` runs."""
        return [stage for stage in range(len(self.begins)) if self.rank_of(stage) == rank]

    def ranks_of(self, name: str) -> list[int]:
        """Returns the ranks of the axis `pp` that have a parameter: the first, if no stage names the parameter."""
        owners = [stage for stage, names in enumerate(self.owns) if any(covers(one, name) for one in names)]
        return sorted({self.rank_of(stage) for stage in owners}) or [0]

    def check(self) -> None:
        """Raises UserError if the number of stages does not fit the ranks and the schedule."""
        count, known = len(self.begins), (*ONE_STAGE, *SEVERAL_STAGES, *V_SHAPED)
        if self.schedule not in known:
            raise UserError(f"plan: schedule {self.schedule!r} is not supported; use one of {', '.join(known)}")
        fits = count % self.pp == 0 and count // self.pp > 1
        each = "a multiple of pp, more than pp"
        if self.schedule in (*ONE_STAGE, *V_SHAPED):
            stages = self.pp * (2 if self.schedule in V_SHAPED else 1)
            fits, each = count == stages, str(stages)
        if not fits:
            raise UserError(
                f"plan: {count} stages on {self.pp} pipeline ranks do not fit the schedule {self.schedule}, which "
                f"needs {each}; change STAGES or SCHEDULE"
            )
        least = count if self.schedule == "DualPipeV" else 1
        if self.micro_batches < least:
            raise UserError(f"plan: {self.micro_batches} micro-batches; {self.schedule} needs at least {least}")
        if self.begins[0]:
            raise UserError(f'plan: the first stage begins with "", the module itself, and not {self.begins[0]!r}')


def stages_of(pp: int, table: Sequence[Any], schedule: str, micro_batches: int) -> Stages:
    """Returns the stages of a plan's table: (module with whose call a stage begins, what the stage has), ..."""
    return Stages(pp, [begin for begin, _ in table], [names for _, names in table], schedule, micro_batches)


def covers(entry: str, name: str) -> bool:
    """Whether a parameter is in what an entry names: `h.0..3` covers `h.2.weight`, and `head` covers `head.weight`."""
    words = [] if entry == "" else entry.replace("..", "\0").split(".")
    parts = name.split(".")
    if len(words) > len(parts):
        return False
    for word, part in zip(words, parts, strict=False):
        first, found, last = word.partition("\0")
        if found and first.isdigit() and last.isdigit():
            if not (part.isdigit() and int(first) <= int(part) <= int(last)):
                return False
        elif word != part:
            return False
    return True


class StagedRuntime(Runtime):
    """The tables of a plan with stages, which `apply` carries out on a module.

    Args:
        stages: the stages.
        dp: number of ranks of the data axis.
        tp: number of ranks of the tensor axis.
        mesh: the devices, or None for all ranks.
        loss: outputs -> loss; None if the module returns its loss.
        tables: see `Runtime`.
    """

    def __init__(
        self,
        stages: Stages,
        dp: int,
        tp: int,
        mesh: DeviceMesh | None,
        loss: Callable[..., torch.Tensor] | None,
        **tables: Any,
    ):
        stages.check()
        pp = stages.pp
        if mesh is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            ranks = torch.arange(dist.get_world_size())
        else:
            device, ranks = mesh.device_type, mesh.mesh.flatten()
        if ranks.numel() != pp * dp * tp:
            raise UserError(
                f"the plan is for {pp * dp * tp} devices (pp {pp} x dp {dp} x tp {tp}), and there are {ranks.numel()}"
            )
        ranks = ranks.view(pp, dp * tp)
        self.whole = DeviceMesh(device, ranks, mesh_dim_names=("pp", "stage"))
        self.meshes = [
            mesh_of(dp, tp, DeviceMesh(device, ranks[rank], mesh_dim_names=("stage",))) for rank in range(pp)
        ]
        self.group, self.rank = self.whole.get_group("pp"), self.whole.get_local_rank("pp")
        super().__init__(self.meshes[self.rank], **tables)
        self.stages, self.loss = stages, loss
        self.device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        self.forwards: dict[str, Callable] = {}
        self.held: dict[Any, torch.Tensor] = {}
        self.calls: dict[Any, _Call] = {}
        self.player: Player | None = None

    def apply(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Makes a module run in stages; see `Runtime.apply`."""
        self.model = model
        names = {name for name, _ in model.named_modules()}
        for name in self.stages.begins:
            if name not in names:
                raise UserError(f"plan: stages: {name!r} is no module of {type(model).__name__}; name one of its modules")
        super().apply(model, *args, **kwargs)
        self.tied = self._tied_parameters(model, self.whole.mesh)
        return model

    def _tied_parameters(self, model: nn.Module, ranks: torch.Tensor) -> list[tuple[Any, dist.ProcessGroup]]:
        """Returns the parameters of this rank that other stages have too, with the groups of ranks that have them."""
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        found = []
        for name, parameter in model.named_parameters():
            owners = tuple(self._owners(name))
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

    @property
    def aliases(self) -> Mapping[str, list[str]]:
        """Name of a parameter -> all names of the parameter, which may be tied."""
        if not hasattr(self, "_aliases"):
            by_tensor: dict[Any, list[str]] = {}
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                by_tensor.setdefault(parameter, []).append(name)
            self._aliases = {name: names for names in by_tensor.values() for name in names}
        return self._aliases

    def _stored(self, name: str, shape: Sequence[int]) -> tuple[DeviceMesh, list[Placement]]:
        owners = self._owners(name)
        _, placements = super()._stored(name, shape)
        return self.meshes[self.rank if self.rank in owners else owners[0]], placements

    def gather(self, parameter: Any) -> Any:
        """Returns a parameter of this rank, as gathered for this call; others as they are."""
        return self.held.get(parameter, parameter) if isinstance(parameter, DTensor) else parameter

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Context of a call: parameters are gathered over `dp`, and have no gradient."""
        before = []
        for parameter in self.model.parameters():
            if isinstance(parameter, DTensor) and parameter.device_mesh == self.mesh:
                full = full_over_dp(parameter.detach(), self.mode.dtype).detach()
                self.held[parameter] = full.requires_grad_(parameter.requires_grad)
                before.append((parameter, parameter.grad))
                parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient
            self.held = {}

    def _gradients(self) -> tuple[list[Any], list[torch.Tensor]]:
        """Returns the parameters that have gradients in this call, and their gradients with the parameters' placements."""
        found: dict[Any, torch.Tensor] = {}
        for parameter, full in self.held.items():
            parts = [one for one in (full.grad, parameter.grad) if one is not None]
            for one in parts:
                reduced = cast(DTensor, one.to(parameter.dtype)).redistribute(placements=parameter.placements)
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
        parts = [map_tensors(_rows(rows, rows // count, number), (args, kwargs)) for number in range(count)]
        inputs = [self._sharded_inputs(self._all_rows(one), *one) for one in parts]
        key = _signature(inputs[0]), self.model.training, torch.is_grad_enabled()
        if key not in self.calls:
            self.calls[key] = _Call(self, forward, self._all_rows(parts[0]), *inputs[0])
        call = self.calls[key]
        seed = int(torch.randint(0, 1 << 40, ()))
        devices = [self.device] if self.device.type == "cuda" else []
        with self._holding():
            with torch.random.fork_rng(devices):
                loss = call.run(inputs, seed)
            parameters, gradients = self._gradients() if torch.is_grad_enabled() else ([], [])
        dist.broadcast(loss, group=self.group, group_src=self.stages.rank_of(len(self.stages.begins) - 1))
        buffers = dict(self.model.named_buffers())
        for name, stage in sorted(call.trace.written.items()):
            dist.broadcast(buffers[name], group=self.group, group_src=self.stages.rank_of(stage))
        if not torch.is_grad_enabled():
            return loss
        return HandOver.apply(loss.requires_grad_(), gradients, *parameters)

    def _all_rows(self, call: Any) -> int:
        rows = batch_rows(call) or 0
        return rows * self.dp if "inputs" in self.local else rows


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


def _scaled(one: DTensor, scale: torch.Tensor) -> DTensor:
    local = one.to_local() * scale.to(one.dtype)
    return DTensor.from_local(
        local, one.device_mesh, one.placements, run_check=False, shape=one.shape, stride=one.stride()
    )


class _Stage(nn.Module):
    """A stage as `PipelineStage` calls it."""

    def __init__(self, call: _Call, number: int):
        super().__init__()
        self.__dict__.update(call=call, stage=number)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """The parameters for which schedules that split backward passes compute gradients."""
        held = self.call.runtime.held
        return iter([*held, *held.values()])

    def forward(self, *received: torch.Tensor, number: torch.Tensor) -> Any:
        """Runs the micro-batch with an index."""
        return self.call.run_stage(self.stage, received, int(number[0]))


class _Call:
    """A schedule for calls of the module with inputs of one shape.

    Args:
        runtime: the runtime.
        forward: the module's forward, with what the runtime wraps around.
        rows: number of rows of a micro-batch, of all data ranks.
        args: positional inputs of the first micro-batch, as DTensors.
        kwargs: keyword inputs likewise.
    """

    def __init__(self, runtime: StagedRuntime, forward: Callable, rows: int, args: Any, kwargs: Any):
        self.runtime, self.forward, self.rows = runtime, forward, rows
        stages = runtime.stages
        self.trace: Trace = trace_stages(
            runtime.model, stages.begins, args, kwargs, loss=runtime.loss, dtype=runtime.mode.dtype,
            islands=lambda name: match(name, runtime.islands), forwards=runtime.forwards,
        )  # fmt: skip
        self._check_parameters()
        self.losses: dict[int, torch.Tensor] = {}
        self.inputs: list[Any] = []
        self.seed = 0
        self.grad = torch.is_grad_enabled()
        self.schedule = self._schedule() if self.grad else None

    def _check_parameters(self) -> None:
        """Raises UserError if a stage uses a parameter that it does not have."""
        runtime = self.runtime
        for name, users in self.trace.uses.items():
            for stage in sorted(users):
                if runtime.stages.rank_of(stage) not in runtime._owners(name):
                    raise UserError(f"plan: stage {stage} uses {name}; add the name to this stage in STAGES")

    def _schedule(self) -> Any:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        runtime, stages, trace = self.runtime, self.runtime.stages, self.trace
        logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.WARNING)
        last = len(stages.begins) - 1
        number, loss = torch.zeros(1, dtype=torch.int64), torch.empty((), dtype=trace.dtype, device="meta")
        metas = [[self._meta(one) for one in sent.values()] for sent in trace.sent]
        made = [
            PipelineStage(
                _Stage(self, stage), stage, last + 1, runtime.device,
                input_args=tuple(metas[stage]) if stage else (number.to("meta"),),
                output_args=tuple(metas[stage + 1]) if stage < last else (loss.requires_grad_(),),
                group=runtime.group,
            )
            for stage in stages.stages_of(runtime.rank)
        ]  # fmt: skip
        kind = get_schedule_class(stages.schedule)
        return kind(
            made[0] if stages.schedule in ONE_STAGE else made, stages.micro_batches, scale_grads=False,
            loss_fn=lambda out, _: out,
        )  # fmt: skip

    def run(self, inputs: list[Any], seed: int) -> torch.Tensor:
        """Runs all micro-batches. Returns the loss, which is right on the rank of the last stage."""
        stages, runtime = self.runtime.stages, self.runtime
        self.inputs, self.seed, self.losses = inputs, seed, {}
        numbers = torch.arange(len(inputs))
        own = stages.stages_of(runtime.rank)
        given = [numbers] if 0 in own else []
        target = numbers if len(stages.begins) - 1 in own else None
        if self.grad:
            self.schedule.step(*given, number=numbers, target=target, return_outputs=False)
        else:
            for number in range(len(inputs)):
                self._run_forward(number)
        self.inputs = []
        zero = torch.zeros((), dtype=self.trace.dtype, device=runtime.device)
        return sum((self.losses[number] for number in sorted(self.losses)), start=zero)

    def _run_forward(self, number: int) -> None:
        """Runs all stages for one micro-batch, one after another. `eval` of V-shaped schedules fails (PyTorch 2.13)."""
        stages, group, own = self.runtime.stages, self.runtime.group, self.runtime.rank
        values: Sequence[torch.Tensor] = ()
        for stage in range(len(stages.begins)):
            before, rank = stages.rank_of(stage - 1) if stage else own, stages.rank_of(stage)
            if stage and own == rank != before:
                metas = map(self._meta, self.trace.sent[stage].values())
                values = [torch.empty_like(meta, device=self.runtime.device) for meta in metas]
                for value in values:
                    dist.recv(value, group=group, group_src=before)
            elif stage and own == before != rank:
                for value in values:
                    dist.send(value, group=group, group_dst=rank)
            if own == rank:
                values = self.run_stage(stage, values, number)

    def run_stage(self, stage: int, received: Sequence[torch.Tensor], number: int) -> Any:
        """Runs one stage for one micro-batch. Returns what the next stage gets, or the loss."""
        runtime = self.runtime
        torch.manual_seed(stage_seed(self.seed, stage, number))
        sent = list(self.trace.sent[stage].values())
        values = [self._enter(*both) for both in zip(received, sent, strict=True)] if stage else []
        player = runtime.player = Player(self.trace, stage, values)
        args, kwargs = self.inputs[number]
        try:
            with runtime.mode, player:
                out = self.forward(*args, **kwargs)
                out = out if runtime.loss is None else runtime.loss(out)
        except EndOfStage:
            runtime.player = None
            return tuple(map(self._leave, player.outputs(), self.trace.sent[stage + 1].values()))
        finally:
            runtime.player = None
        loss = (out.full_tensor() if isinstance(out, DTensor) else out) / len(self.inputs)
        self.losses[number] = loss.detach()
        return loss

    # ---- tensors between stages

    def _placements(self, recorded: torch.Tensor) -> list[Placement]:
        """Returns how a tensor is placed when it is sent: sharded by rows over `dp`, and replicated over `tp`."""
        by_rows = recorded.dim() > 0 and self.rows % self.runtime.dp == 0 and recorded.shape[0] % self.rows == 0
        rows = Shard(0) if by_rows and recorded.shape[0] else Replicate()
        return placements_on(self.runtime.mesh, rows, Replicate())

    def _meta(self, recorded: torch.Tensor) -> torch.Tensor:
        shape = list(recorded.shape)
        if any(isinstance(one, Shard) for one in self._placements(recorded)):
            shape[0] //= self.runtime.dp
        made = torch.empty(shape, dtype=recorded.dtype, device="meta")
        return made.requires_grad_(recorded.requires_grad and self.grad)

    def _enter(self, local: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
        stride = torch.empty(recorded.shape, device="meta").stride()
        return DTensor.from_local(
            local, self.runtime.mesh, self._placements(recorded), run_check=False, shape=recorded.shape, stride=stride
        )

    def _leave(self, value: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
        if isinstance(value, DTensor):
            placements = self._placements(recorded)
            value = value.redistribute(placements=placements).to_local(grad_placements=placements)
        return value.clone(memory_format=torch.contiguous_format)  # schedules detach it in place: no view


def stage_seed(seed: int, stage: int, micro_batch: int) -> int:
    """Returns the seed of random numbers of a stage for a micro-batch."""
    return seed + 1_000_003 * micro_batch + stage


def _rows(rows: int, size: int, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that takes the rows of a micro-batch from a tensor that has all rows."""
    own = slice(number * size, (number + 1) * size)
    return lambda tensor: tensor[own] if tensor.dim() and tensor.shape[0] == rows else tensor


def _signature(inputs: Any) -> str:
    return str(map_tensors(lambda one: (tuple(one.shape), str(one.dtype), str(one.device)), inputs))

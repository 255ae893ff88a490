"""Runs the micro-batches of a call through pipeline stages, in the order of a schedule of PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from weft.errors import UserError
from weft.planner.parallelize.axes import placements_on
from weft.planner.parallelize.runtime import match
from weft.planner.parallelize.stage_follow import EndOfStage, Player, Trace
from weft.planner.parallelize.stage_table import ONE_STAGE
from weft.planner.parallelize.stage_trace import trace_stages
from weft.planner.parallelize.torch_private import buffers_of, is_fake

if TYPE_CHECKING:
    from weft.planner.parallelize.stage_run import StagedRuntime

Begin = Callable[[int, int], None]  # (stage, index of the micro-batch)
Finish = Callable[[int, Any], torch.Tensor]  # (index of the micro-batch, outputs) -> its loss


class _ContiguousGradient(torch.autograd.Function):
    """A tensor whose gradient is contiguous, as sending needs."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Returns the tensor."""
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Returns the gradient, contiguous."""
        return gradient.contiguous()


class _After(torch.autograd.Function):
    """A result of a stage, as a function of the tensors that the stage received.

    Backward passes that are split in two find the parameters of results that depend on no received tensor only so.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *received: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Returns the result."""
        ctx.count = len(received)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        """Returns the gradient of the result; the received tensors get none."""
        return gradient, *[None] * ctx.count


class StageModule(nn.Module):
    """A stage as `PipelineStage` calls it."""

    call: StageCalls
    stage: int

    def __init__(self, call: StageCalls, number: int):
        super().__init__()
        self.__dict__.update(call=call, stage=number)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """The parameters for which schedules that split backward passes compute gradients."""
        held = self.call.runtime.held
        return iter([*held, *held.values()])

    def forward(self, *received: torch.Tensor, number: torch.Tensor) -> Any:
        """Runs the micro-batch with an index."""
        return self.call.run_stage(self.stage, received, int(number[0]))


class StageCalls:
    """A schedule for calls of the module with inputs of one shape.

    Args:
        runtime: the runtime.
        count: number of micro-batches.
        rows: number of rows of a micro-batch, of all data ranks.
        args: positional inputs of the first micro-batch, as DTensors.
        kwargs: keyword inputs likewise.
        returns_loss: whether the module, or the runtime's `loss`, returns the loss of a micro-batch.
    """

    def __init__(self, runtime: StagedRuntime, count: int, rows: int, args: Any, kwargs: Any, returns_loss: bool):
        self.runtime, self.count, self.rows = runtime, count, rows
        stages = runtime.stages
        self.trace: Trace = trace_stages(
            runtime.model, stages.begins, args, kwargs, loss=runtime.loss, dtype=runtime.mode.dtype,
            islands=lambda name: match(name, runtime.islands), forwards=runtime.forwards,
        )  # fmt: skip
        if returns_loss and self.trace.dtype is None:
            raise UserError(
                f"stages: {type(runtime.model).__name__} returns {self.trace.returns} instead of a scalar loss; return "
                "the loss alone, or give apply loss=, a function of the outputs"
            )
        self.dtype = self.trace.dtype or torch.float32  # of the losses
        self._check_parameters()
        self.inputs: Sequence[Any] = ()
        self.grad = torch.is_grad_enabled()
        self.schedule: Any = self._schedule() if self.grad else None

    def _check_parameters(self) -> None:
        """Raises UserError if a stage uses a parameter that it does not have."""
        runtime = self.runtime
        for name, users in self.trace.uses.items():
            for stage in sorted(users):
                if runtime.stages.rank_of(stage) not in runtime._owners(name):
                    raise UserError(f"plan: stage {stage} uses {name}; add the name to this stage in STAGES")

    def _schedule(self) -> Any:
        from torch.distributed.pipelining.schedules import get_schedule_class

        from weft.parallel.axes.torch_private import Stage

        runtime, stages, trace = self.runtime, self.runtime.stages, self.trace
        logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.WARNING)
        last = len(stages.begins) - 1
        number, loss = torch.zeros(1, dtype=torch.int64), torch.empty((), dtype=self.dtype, device="meta")
        metas = [[self._meta(one) for one in sent.values()] for sent in trace.sent]
        made = [
            Stage(
                StageModule(self, stage), stage, last + 1, runtime.device,
                input_args=tuple(metas[stage]) if stage else (number.to("meta"),),
                output_args=tuple(metas[stage + 1]) if stage < last else (loss.requires_grad_(),),
                group=runtime.group,
            )
            for stage in stages.stages_of(runtime.rank)
        ]  # fmt: skip
        kind = get_schedule_class(stages.schedule)
        return kind(
            made[0] if stages.schedule in ONE_STAGE else made, self.count, scale_grads=False,
            loss_fn=lambda out, _: out,
        )  # fmt: skip

    def run(self, inputs: Sequence[Any], begin: Begin, finish: Finish) -> None:
        """Runs all micro-batches; see `StagedRuntime.run`.

        Args:
            inputs: positional and keyword arguments of each micro-batch, as DTensors.
        """
        stages, runtime = self.runtime.stages, self.runtime
        self.inputs, self.begin, self.finish = inputs, begin, finish
        numbers = torch.arange(len(inputs))
        own = stages.stages_of(runtime.rank)
        given = [numbers] if 0 in own else []
        target = numbers if len(stages.begins) - 1 in own else None
        if runtime.device.type == "meta":
            self._run_without_data()
        elif self.grad:
            self.schedule.step(*given, number=numbers, target=target, return_outputs=False)
        else:
            for number in range(len(inputs)):
                self._run_forward(number)
        self.inputs = ()
        del self.begin, self.finish  # they may hold tensors of the call

    def _run_without_data(self) -> None:
        """Runs forward and backward of this rank's stages, without the tensors of other ranks."""
        for number in range(len(self.inputs)):
            for stage in self.runtime.stages.stages_of(self.runtime.rank):
                out = self.run_stage(stage, [self._meta(one) for one in self.trace.sent[stage].values()], number)
                tensors = [one for one in ([out] if isinstance(out, torch.Tensor) else out) if one.requires_grad]
                torch.autograd.backward(tensors, [torch.ones_like(one) for one in tensors])

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
        self.begin(stage, number)
        sent = list(self.trace.sent[stage].values())
        values = [self._enter(*both) for both in zip(received, sent, strict=True)] if stage else []
        player = runtime.player = Player(self.trace, stage, values)
        args, kwargs = self.inputs[number]
        try:
            with self._buffers(), runtime.mode, player:
                out = runtime.within(*args, **kwargs)
                out = out if runtime.loss is None else runtime.loss(out)
        except EndOfStage:
            runtime.player = None
            sent = self.trace.sent[stage + 1].values()
            return tuple(self._leave(*both, received) for both in zip(player.outputs(), sent, strict=True))
        finally:
            runtime.player = None
        return self.finish(number, out).to(self.dtype)

    @contextmanager
    def _buffers(self) -> Iterator[None]:
        """Context in which the forward may assign buffers; what skipped calls assign is undone."""
        before = [
            (buffers_of(module), dict(buffers_of(module)))
            for name, module in self.runtime.model.named_modules()
            if name in self.trace.spanning
        ]
        try:
            yield
        finally:
            for now, old in before:
                for name, buffer in now.items():
                    if isinstance(buffer, DTensor):
                        now[name] = buffer.full_tensor().detach()
                    elif buffer is not None and is_fake(buffer):
                        now[name] = old[name]

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
            _ContiguousGradient.apply(local),
            self.runtime.mesh,
            self._placements(recorded),
            run_check=False,
            shape=recorded.shape,
            stride=stride,
        )

    def _leave(self, value: torch.Tensor, recorded: torch.Tensor, received: Sequence[torch.Tensor]) -> torch.Tensor:
        if isinstance(value, DTensor):
            placements = self._placements(recorded)
            value = value.redistribute(placements=placements).to_local(grad_placements=placements)
        if value.requires_grad and received:
            value = _After.apply(value, *received)
        return value.clone(memory_format=torch.contiguous_format)  # schedules detach it in place: no view


def draw_seed() -> int:
    """Returns the seed of a call, from the generator of the CPU, which must have the same state on all ranks."""
    return int(torch.randint(0, 1 << 40, ()))


def stage_seed(seed: int, stage: int, micro_batch: int) -> int:
    """Returns the seed of random numbers of a stage for a micro-batch.

    Args:
        seed: the seed of the call.
    """
    return seed + 1_000_003 * micro_batch + stage


def rows_of_micro_batch(rows: int, count: int, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that takes the rows of a micro-batch from a tensor that has all rows.

    Args:
        rows: number of rows of the batch.
        count: number of micro-batches, which divides `rows`.
    """
    size = rows // count
    own = slice(number * size, (number + 1) * size)
    return lambda tensor: tensor[own] if tensor.dim() and tensor.shape[0] == rows else tensor

"""Trains a custom model in the pipeline stages of a plan: each step is one call of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft.config.mesh import ParallelSection
from weft.data.batches.batch import Batch
from weft.observe.status import alive
from weft.parallel.local_parameters import local
from weft.parallel.objective import Objective, Totals
from weft.parallel.passes import FrozenModel, Passes, check_no_compute
from weft.parallel.world import World
from weft.planner.parallelize.containers import map_tensors
from weft.planner.parallelize.stage_run import StagedRuntime
from weft.planner.parallelize.torch_private import parameters_of


class OtherParameters:
    """The parameters of a module that another pipeline rank has.

    Their names have the value None, except within `present`: so optimizer, norms and checkpoints see each parameter on
    one pipeline rank. Of a parameter that several stages use, the first of their ranks has the parameter, and the
    others have copies.

    Args:
        model: the module, to which `runtime` was applied.
    """

    def __init__(self, model: nn.Module, runtime: StagedRuntime):
        self.slots = [
            (parameters_of(module), name, parameter)
            for module in model.modules()
            for name, parameter in parameters_of(module).items()
            if parameter is not None and runtime.owners[parameter][0] != runtime.rank
        ]
        self._remove()

    @contextmanager
    def present(self) -> Iterator[None]:
        """Context in which the module has all parameters: its forward may use them, also where calls are skipped."""
        for own, name, parameter in self.slots:
            own[name] = parameter
        try:
            yield
        finally:
            self._remove()

    def _remove(self) -> None:
        for own, name, _ in self.slots:
            own[name] = None


class StagePasses(Passes):
    """Runs a step's micro-batches through the stages of a plan, in the order of the plan's schedule.

    Args:
        runtime: what `Plan.runtime` returned and was applied to `model`, with local inputs and outputs.
        others: the parameters of other pipeline ranks.
        dtype: dtype of the outputs that the objective gets.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        world: World,
        parallel: ParallelSection,
        frozen: Mapping[str, FrozenModel] | None = None,
        *,
        runtime: StagedRuntime,
        others: OtherParameters,
        dtype: torch.dtype,
    ):
        super().__init__(model, objective, world, parallel, frozen)
        check_no_compute(objective)
        self.runtime, self.others, self.dtype = runtime, others, dtype

    def train(
        self,
        micro_batches: Sequence[Batch],
        *,
        weight: float,
        learned_tokens: float,
        seed: Callable[[int], int],
        loss_scale: float = 1.0,
    ) -> torch.Tensor:
        """Runs forward and backward of the micro-batches in the schedule's order, and adds to the gradients.

        All ranks of a pipeline must pass the same micro-batches. Arguments and result are described in `Passes.train`.
        """
        totals = Totals(self.scalars, self.world.device)
        padded, inputs, shards = self.inputs_of_step(micro_batches, learned_tokens / loss_scale)

        def begin(stage: int, number: int) -> None:
            alive()
            self.seed_micro_batch(padded[number], seed)
            if stage:
                torch.manual_seed(torch.initial_seed() + stage)

        def finish(number: int, outputs: torch.Tensor) -> torch.Tensor:
            divided = totals.add(self.objective.loss(outputs, shards[number])) / weight
            return divided if loss_scale == 1.0 else divided * loss_scale

        for parameter, gradient in self._run(inputs, begin, finish):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return self.reduce_totals(totals.vector)

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Returns `Totals.vector` of a batch. Runs the stages one after another."""
        totals = Totals(self.scalars, self.world.device)
        batch, shard = self.shard(batch, self.prepare([batch])[0])
        inputs = self.complete(self.objective.inputs(shard), batch, shard, None)
        self._run([inputs], _alive, lambda _, outputs: totals.add(self.objective.loss(outputs, shard)))
        return self.reduce_totals(totals.vector)

    def outputs(self, inputs: dict[str, Any], shard: Batch) -> torch.Tensor:
        """Returns the model's outputs for this rank's shard of a batch, on all ranks of the pipeline."""
        found: list[torch.Tensor] = []

        def finish(_: int, outputs: torch.Tensor) -> torch.Tensor:
            found.append(outputs)
            return outputs

        self._run([inputs], _alive, finish)
        group, last = self.runtime.group, self.runtime.last
        described: list[Any] = [(found[0].shape, found[0].dtype) if found else None]
        dist.broadcast_object_list(described, group=group, group_src=last, device=torch.device("cpu"))
        shape, dtype = described[0]
        outputs = found[0].contiguous() if found else torch.empty(shape, dtype=dtype, device=self.world.device)
        dist.broadcast(outputs, group=group, group_src=last)
        return outputs

    def reduce_totals(self, total: torch.Tensor) -> torch.Tensor:
        """Sums totals in place over the stages. The totals of all stages but the last are 0."""
        dist.all_reduce(total, group=self.runtime.group)
        return super().reduce_totals(total)

    @torch.no_grad()
    def after_update(self) -> None:
        """Must be called after weights change. Updates the copies of parameters that several stages use."""
        for parameter, group in self.runtime.tied:
            dist.broadcast(local(cast(DTensor, parameter)), group=group, group_src=0)

    def _run(
        self,
        inputs: Sequence[dict[str, Any]],
        begin: Callable[[int, int], None],
        finish: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> list[tuple[Any, torch.Tensor]]:
        """Runs the stages. Returns this rank's parameters with their gradients, which are summed over the stages.

        Args:
            inputs: the inputs of each micro-batch, as `complete` returns them.
            finish: (index of the micro-batch, what the objective gets of the model) -> loss.
        """
        rows = len(inputs[0]["tokens"]) * self.runtime.dp

        def leave(number: int, out: Any) -> torch.Tensor:
            out = map_tensors(lambda value: self.runtime.own_rows(rows, value), out)
            casts = isinstance(out, torch.Tensor) and out.is_floating_point()
            return finish(number, self.forward.finish(out.to(self.dtype) if casts else out, inputs[number]))

        with self.others.present():
            calls = [self.forward.arguments(one) for one in inputs]
            _, parameters, gradients = self.runtime.run(calls, begin, leave, returns_loss=False)
        own = zip(parameters, gradients, strict=True)
        return [(one, gradient) for one, gradient in own if self.runtime.owners[one][0] == self.runtime.rank]


def _alive(*_: int) -> None:
    alive()

"""A step's micro-batches, forward and backward, by this rank and those that share its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from weft.config.mesh import ParallelSection
from weft.data.batches.batch import Batch
from weft.models.forward import forward_of
from weft.models.layers.moe import Router
from weft.observe.status import alive
from weft.parallel.model_state import state_of
from weft.parallel.objective import Loss, Objective, Totals
from weft.parallel.world import World


class Passes:
    """Whole micro-batches, one after another.

    Args:
        model: from `build_sharded_model`.
        objective: gives inputs and losses.
    """

    def __init__(self, model: nn.Module, objective: Objective, world: World, parallel: ParallelSection):
        self.model, self.objective, self.world, self.parallel = model, objective, world, parallel
        self.forward = forward_of(model)
        state = state_of(model)
        self.context = None if state is None else state.context
        self.balances = any(isinstance(module, Router) for module in model.modules())
        self.scalars: tuple[str, ...] = tuple(getattr(objective, "scalars", ()))
        self.compute = getattr(objective, "compute", None)
        self._prepare = getattr(objective, "prepare", None)

    def train(
        self,
        micro_batches: Sequence[Batch],
        *,
        weight: float,
        learned: float,
        seed: Callable[[Batch], None],
        factor: float = 1.0,
    ) -> torch.Tensor:
        """Add up the gradients of the micro-batches' losses divided by `weight`; in the last backward, over the ranks.

        Args:
            weight: of the global batch; not 0.
            learned: the global batch's number of tokens that are learned from, by which a balance of experts is shared.
            seed: is called before each forward.
            factor: gradients are so many times as large, for the sake of their precision.

        Returns:
            `Totals.vector` of these rows, the loss not divided: the same on all ranks that have them.
        """
        totals, prepared = Totals(self.scalars, self.world.device), self.prepare(micro_batches)
        for number, micro_batch in enumerate(micro_batches):
            alive()
            on_last_micro_batch(self.model, number + 1 == len(micro_batches))
            batch, own = self.place(micro_batch, prepared[number])
            seed(micro_batch)
            loss = totals.add(self.lose(batch, own, learned / factor))
            divided = loss / weight
            (divided if factor == 1.0 else divided * factor).backward()
        return self.of_rows(totals.vector)

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """`Totals.vector` of the rows: the same on all ranks that have them."""
        totals = Totals(self.scalars, self.world.device)
        totals.add(self.lose(*self.place(batch, self.prepare([batch])[0]), None))
        return self.of_rows(totals.vector)

    def updated(self) -> None:
        """Weights have changed: by an update, or because they were filled in."""

    def replaced(self) -> None:
        """Weights were set outside of an update, at any time: what FSDP2 still has of the old ones is dropped."""
        for root in self.roots:
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        self.updated()

    @property
    def roots(self) -> Sequence[nn.Module]:
        """The modules that are called."""
        return (self.model,)

    def lose(self, batch: Batch, own: Batch, learned: float | None) -> torch.Tensor | Loss:
        """The loss of what this rank has of some rows."""
        if self.compute is not None:
            return self.compute(lambda inputs: self.forward(self.complete(inputs, batch, own, learned)), own)
        outputs = self.forward(self.complete(self.objective.inputs(own), batch, own, learned))
        return self.objective.loss(outputs, own)

    @torch.no_grad()
    def prepare(self, micro_batches: Sequence[Batch]) -> list[dict[str, torch.Tensor]]:
        """What the objective computes of each micro-batch by forwards without gradient; nothing for most objectives."""
        if self._prepare is None:
            return [{} for _ in micro_batches]
        prepared, training = [], self.model.training
        self.model.eval()
        for micro_batch in micro_batches:
            alive()
            batch, own = self.place(micro_batch, {})
            given = self._prepare(lambda inputs, b=batch, o=own: self.look(self.complete(inputs, b, o, None), o), own)
            prepared.append(dict(given))
        self.model.train(training)
        return prepared

    def look(self, inputs: dict[str, Any], own: Batch) -> torch.Tensor:
        """The model's outputs, on every rank that shares the rows, without gradient."""
        return self.forward(inputs)

    def place(self, batch: Batch, prepared: dict[str, torch.Tensor]) -> tuple[Batch, Batch]:
        """The batch on the device, and the same with those of its tokens that are this rank's."""
        batch = batch.to(self.world.device)
        own = batch if self.context is None else self.context.own(batch)
        return batch, replace(own, extra={**own.extra, **prepared}) if prepared else own

    def complete(self, inputs: Mapping[str, Any], batch: Batch, own: Batch, learned: float | None) -> dict[str, Any]:
        """What the model is given: an objective's inputs, and what the mesh and a balance of experts ask for."""
        given = dict(inputs)
        if self.context is not None:
            given |= self.context.extra(batch)
            if given.get("positions") is None:  # counted along a part of a row they would be wrong
                given["positions"] = own.positions
        if self.balances and learned is not None:
            given["loss_weights"] = batch.weight.sum(1, dtype=torch.float64) / (learned or 1.0)
        return given

    def of_rows(self, total: torch.Tensor) -> torch.Tensor:
        """What the ranks that share rows have found of them, together."""
        if self.world.shape.cp > 1:
            dist.all_reduce(total, group=self.world.group("cp"))
        return total


def on_last_micro_batch(model: nn.Module, last: bool) -> None:
    """Say before each backward whether it is the step's last: gradients are summed over the ranks once a step.

    Or, if that is set, with every micro-batch, over the ranks that share a copy of the model; copies add up their sums
    with the last one. Where nothing is sharded, or gathered parameters are kept until backward anyway, they are also
    kept from one micro-batch to the next.
    """
    state = state_of(model)
    if state is None or not isinstance(model, FSDPModule):
        return  # a single rank
    parallel = state.plan.parallel
    model.set_requires_gradient_sync(last or parallel.reduces_every)
    model.set_requires_all_reduce(last)
    model.set_is_last_backward(last)
    for module in model.modules():
        if isinstance(module, FSDPModule) and (module in state.unsharded_units or parallel.reshards is False):
            module.set_reshard_after_backward(last, recurse=False)

"""A step's micro-batches, forward and backward, by this rank and those that share its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from weft.config.mesh import ParallelSection
from weft.data.batches.batch import Batch
from weft.models.forward import forward_of
from weft.models.layers.experts import Router
from weft.parallel.axes.fsdp import on_last_micro_batch
from weft.parallel.world import World


class Asked(Protocol):
    """What is asked of an objective here (`weft.objectives.objective.Objective`)."""

    def weight(self, batch: Batch) -> torch.Tensor: ...

    def inputs(self, batch: Batch) -> dict[str, Any]: ...

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor: ...


class Passes:
    """Whole micro-batches, one after another.

    Args:
        model: from `parallelize`.
        objective: gives inputs and losses.
    """

    def __init__(self, model: nn.Module, objective: Asked, world: World, parallel: ParallelSection):
        self.model, self.objective, self.world, self.parallel = model, objective, world, parallel
        self.forward = forward_of(model)
        self.context = getattr(model, "weft_context", None)
        self.balances = any(isinstance(module, Router) for module in model.modules())

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
            The sum of these rows' losses, not divided: the same on all ranks that have them.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for number, micro_batch in enumerate(micro_batches, start=1):
            on_last_micro_batch(self.model, number == len(micro_batches), self.parallel)
            seed(micro_batch)
            inputs, own = self.inputs(micro_batch, learned / factor)
            loss = self.objective.loss(self.forward(inputs), own)
            divided = loss / weight
            (divided if factor == 1.0 else divided * factor).backward()
            total += loss.detach()
        return self.of_rows(total)

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """The sum of the rows' losses: the same on all ranks that have them."""
        inputs, own = self.inputs(batch, None)
        return self.of_rows(self.objective.loss(self.forward(inputs), own).detach())

    def updated(self) -> None:
        """Weights have changed: by an update, or because they were filled in."""

    def inputs(self, batch: Batch, learned: float | None) -> tuple[dict[str, Any], Batch]:
        """What the model is given, and the batch with those of its tokens that are this rank's."""
        batch = batch.to(self.world.device)
        own = batch if self.context is None else self.context.own(batch)
        inputs = self.objective.inputs(own)
        if self.context is not None:
            inputs |= self.context.extra(batch)
            if inputs.get("positions") is None:  # counted along a part of a row they would be wrong
                inputs["positions"] = own.positions
        if self.balances and learned is not None:
            inputs["shares"] = batch.weight.sum(1) / (learned or 1.0)
        return inputs, own

    def of_rows(self, total: torch.Tensor) -> torch.Tensor:
        """What the ranks that share rows have found of them, together."""
        if self.world.shape.cp > 1:
            dist.all_reduce(total, group=self.world.group("cp"))
        return total

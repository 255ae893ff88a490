"""Models that an objective calls beside the trained model, and that training does not change."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.data.batches.batch import Batch
from weft.models.adapter import is_adapter
from weft.parallel.axes.pipeline import passes_of
from weft.parallel.local_parameters import local
from weft.parallel.model_state import state_of
from weft.parallel.objective import Objective
from weft.parallel.passes import Passes
from weft.parallel.ranks import all_gather_object


class FrozenCopy:
    """A frozen model with its own weights, sharded over the mesh of the trained model.

    Args:
        model: a model from `build_sharded_model`, with loaded weights. Its sequences must be sharded over `cp` like
            those of the trained model.
    """

    def __init__(self, model: nn.Module):
        state = state_of(model)
        assert state is not None
        self.passes = passes_of(model.eval(), Objective(), state.world, state.plan.parallel)
        self.passes.after_update()

    def outputs(self, trained: Passes, inputs: Mapping[str, Any], batch: Batch, shard: Batch) -> torch.Tensor:
        """Returns the model's outputs, as `FrozenModel.outputs` describes. Frees gathered weights afterwards."""
        passes = self.passes
        passes.shard(batch, {})  # the masks of `cp` depend on whether the batch has segments
        try:
            return passes.outputs(passes.complete(inputs, batch, shard, None), shard)
        finally:
            passes.free_gathered()

    def tensors(self) -> list[torch.Tensor]:
        """Returns this rank's parameters."""
        return [parameter for root in self.passes.root_modules for parameter in root.parameters()]


class AdapterAtStart:
    """The trained model with the values that its adapter had at the start of the run. Both share the base model.

    Args:
        model: the sharded trained model, which has an adapter.

    Attributes:
        values: parameter name -> this rank's shard of the starting value, as a DTensor like the parameter. Zero until
            `capture` is called, or the values are loaded.
    """

    def __init__(self, model: nn.Module):
        named = model.named_parameters()
        self.trained = {name: parameter for name, parameter in named if parameter.requires_grad and is_adapter(name)}
        self.values = {name: torch.zeros_like(parameter.detach()) for name, parameter in self.trained.items()}

    def digest(self) -> str:
        """Returns a SHA-256 of the starting values, in hexadecimal. Every rank must call it."""
        own = {}
        for name, value in self.values.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            own[name] = hashlib.sha256(full.cpu().contiguous().numpy().tobytes()).hexdigest()
        lines = sorted({f"{name} {found}" for stage in all_gather_object(own) for name, found in stage.items()})
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @torch.no_grad()
    def capture(self) -> None:
        """Copies the current values of the adapter's parameters."""
        for name, parameter in self.trained.items():
            local(self.values[name]).copy_(local(parameter))

    def outputs(self, trained: Passes, inputs: Mapping[str, Any], batch: Batch, shard: Batch) -> torch.Tensor:
        """Returns the outputs of the trained model with the starting values, as `FrozenModel.outputs` describes."""
        with self.in_place(trained):
            return trained.outputs(trained.complete(inputs, batch, shard, None), shard)

    def tensors(self) -> list[torch.Tensor]:
        """Returns this rank's starting values of the adapter."""
        return list(self.values.values())

    @contextmanager
    @torch.no_grad()
    def in_place(self, trained: Passes) -> Iterator[None]:
        """Context in which the parameters of the adapter have their starting values."""
        current = {name: local(parameter).clone() for name, parameter in self.trained.items()}
        try:
            self._set(trained, self.values)
            yield
        finally:
            self._set(trained, current)

    def _set(self, trained: Passes, values: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.trained.items():
            local(parameter).copy_(local(values[name]))
        trained.free_gathered()

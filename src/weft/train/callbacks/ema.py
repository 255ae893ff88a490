"""The callback `ema`: an exponential moving average of the weights (Polyak & Juditsky, 1992)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt
from torch import nn

from weft.checkpoint.tensors import model_tensors
from weft.parallel.local_parameters import local
from weft.train.callbacks import Callback, State


class Ema(Callback):
    """Keeps an exponential moving average (EMA) of the trained parameters.

    The average is a second copy of these parameters, with the same sharding and device. In checkpoints its tensors are
    named `callback/ema/weights/<parameter>`.

    Args:
        decay: decay rate of the average; an update is decay * average + (1 - decay) * parameters.
        every: number of steps between two updates of the average.
        validate: whether validations use the averaged weights.
    """

    def __init__(
        self,
        *,
        decay: Annotated[float, Ge(0), Lt(1)] = 0.999,
        every: Annotated[int, Ge(1)] = 1,
        validate: bool = False,
    ):
        self.decay, self.every, self.validate = decay, every, validate
        self.weights: dict[str, torch.Tensor] = {}
        self.trained: dict[str, nn.Parameter] = {}

    @torch.no_grad()
    def begin(self, state: State) -> None:
        """Starts a new average with the current weights, unless a checkpoint contained the average."""
        self.trained = {
            name: tensor
            for name, (tensor, _) in model_tensors(state.model).items()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        }
        if not self.weights:
            self.weights = {name: parameter.detach().clone() for name, parameter in self.trained.items()}
        if missing := self.trained.keys() - self.weights.keys():
            raise state.mistake(
                f"callbacks: ema: the checkpoint has no average of {sorted(missing)[0]}; remove ema from callbacks"
            )

    @torch.no_grad()
    def step(self, state: State) -> None:
        """Updates the average if `every` divides the step number and the step changed the weights."""
        if state.updated and state.step % self.every == 0:
            for name, parameter in self.trained.items():
                local(self.weights[name]).lerp_(local(parameter.detach()), 1 - self.decay)

    @contextmanager
    def validating(self, state: State) -> Iterator[None]:
        """Context in which the model has the averaged weights, if `validate` is set; otherwise does nothing."""
        if not self.validate:
            yield
            return
        self._swap(state)
        try:
            yield
        finally:
            self._swap(state)

    @torch.no_grad()
    def _swap(self, state: State) -> None:
        for name, parameter in self.trained.items():
            current, average = local(parameter.detach()), local(self.weights[name])
            before = current.clone()
            current.copy_(average)
            average.copy_(before)
        state.weights_replaced()

    def state_dict(self) -> dict[str, Any]:
        """Returns the average by parameter name."""
        return {"weights": dict(self.weights)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the average."""
        self.weights = dict(state.get("weights", {}))

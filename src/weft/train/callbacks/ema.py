"""An exponential moving average of the weights (Polyak & Juditsky, 1992)."""

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
    """Keeps the average beside the weights: a copy of the trained parameters, sharded as they are, on their device.

    Checkpoints have it as `callback/ema/weights/<parameter>`.

    Args:
        decay: of the average, per update.
        every: updates between two of its own.
        validate: use the averaged weights for validations.
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
        """A new average begins with the weights as they are."""
        self.trained = {
            name: tensor
            for name, (tensor, _) in model_tensors(state.model).items()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        }
        if not self.weights:
            self.weights = {name: parameter.detach().clone() for name, parameter in self.trained.items()}
        if missing := self.trained.keys() - self.weights.keys():
            raise state.mistake(f"callbacks: ema: the checkpoint has no average of {sorted(missing)[0]}; take ema out")

    @torch.no_grad()
    def step(self, state: State) -> None:
        """Move towards the new weights."""
        if state.updated and state.step % self.every == 0:
            for name, parameter in self.trained.items():
                local(self.weights[name]).lerp_(local(parameter.detach()), 1 - self.decay)

    @contextmanager
    def validating(self, state: State) -> Iterator[None]:
        """The averaged weights take the places of the others."""
        if not self.validate:
            yield
            return
        self._exchange(state)
        try:
            yield
        finally:
            self._exchange(state)

    @torch.no_grad()
    def _exchange(self, state: State) -> None:
        for name, parameter in self.trained.items():
            mine, average = local(parameter.detach()), local(self.weights[name])
            before = mine.clone()
            mine.copy_(average)
            average.copy_(before)
        state.weights_replaced()

    def state_dict(self) -> dict[str, Any]:
        """The average, by the parameters' names."""
        return {"weights": dict(self.weights)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from an average."""
        self.weights = dict(state.get("weights", {}))

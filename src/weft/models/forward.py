"""Calls a model, which may be a custom model, with the inputs that a training objective defines."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.errors import UserError
from weft.kernels.cross_entropy import logprobs_of_logits


def return_normalizers(model: nn.Module) -> bool:
    """Makes a model that is called with `labels` return `[batch, seq, 2]`: log-probabilities and normalizers.

    The normalizer of a token is log(sum(exp(logits))). Returns False, and changes nothing, if the model does not use
    `weft.kernels.cross_entropy.token_logprobs`.
    """
    if not hasattr(model, "token_logprobs") or getattr(model, "head", model) is None:
        return False
    token_logprobs: Any = model.token_logprobs
    setattr(model, "token_logprobs", partial(token_logprobs, normalizers=True))  # noqa: B010
    return True


class ModelCall:
    """Calls a model with a dict of inputs (`tokens`, ...), and returns the model's outputs.

    A custom model only needs to map tokens `[batch, seq]` to logits `[batch, seq, vocab]`. Its `forward` gets
    `positions`, `segments` and `labels` if it has these arguments. If it has no argument `labels`, the labels'
    log-probabilities are computed from the logits. So is the result of `logits_function`, a function of chunks of
    logits as in `weft.kernels.map_logits`, and of `temperature`, which divides logits.

    Args:
        normalizers: whether calls with `labels` return normalizers, too (`return_normalizers`).
    """

    def __init__(self, model: nn.Module, *, normalizers: bool = False):
        self.model, self.normalizers = model, normalizers
        self.parameters = inspect.signature(model.forward).parameters
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        self.from_logits = not return_normalizers(model) if normalizers else "labels" not in self.parameters

    def __call__(self, inputs: dict[str, Any]) -> torch.Tensor:
        args, kwargs = self.arguments(inputs)
        return self.finish(self.model(*args, **kwargs), inputs)

    def arguments(self, inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the positional and the keyword arguments of the model's `forward`.

        Raises:
            UserError: the inputs have `segments`, but the model's `forward` has no such argument; or they have a
                `temperature`, and the model has no such argument and returns no logits.
        """
        if self.takes_all:
            return (), inputs
        name = type(self.model).__name__.removeprefix("FSDP")
        if inputs.get("segments") is not None and "segments" not in self.parameters:
            raise UserError(
                f"{name}.forward has no argument `segments`, so attention would cross documents; add the argument, or "
                "set data.packing to concatenate and data.document_attention to false"
            )
        labels = self.parameters.get("labels")
        if self._divides(inputs) and labels is not None and labels.default is inspect.Parameter.empty:
            raise UserError(
                f"{name}.forward requires `labels` and has no argument `temperature`, so logits cannot be divided by "
                f"{inputs['temperature']}; add the argument, or return logits if `labels` is None"
            )
        left = self._left(inputs)
        return (inputs["tokens"],), {k: v for k, v in inputs.items() if k in self.parameters and k not in left}

    def finish(self, outputs: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Returns what the objective gets, from what the model's `forward` returned for the inputs."""
        if self.takes_all:
            return outputs
        if self._divides(inputs):
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32)) / inputs["temperature"]
        function = inputs.get("logits_function")
        if function is not None and "logits_function" not in self.parameters:
            logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).flatten(0, 1)
            return function(logits, slice(0, len(logits))).unflatten(0, outputs.shape[:2])
        labels = inputs.get("labels")
        if "labels" not in self._left(inputs) or labels is None:
            return outputs
        return logprobs_of_logits(outputs, labels, normalizers=self.normalizers)

    def _divides(self, inputs: dict[str, Any]) -> bool:
        """Whether logits are divided by a temperature after the model's `forward`."""
        return inputs.get("temperature", 1.0) != 1.0 and "temperature" not in self.parameters

    def _left(self, inputs: dict[str, Any]) -> tuple[str, ...]:
        """Names of the inputs that the model's `forward` does not get as keyword arguments."""
        return ("tokens", "labels") if self.from_logits or self._divides(inputs) else ("tokens",)


def forward_of(model: nn.Module, *, normalizers: bool = False) -> ModelCall:
    """Returns a function that calls a model with a dict of inputs (`tokens`, ...) and returns the model's outputs."""
    return ModelCall(model, normalizers=normalizers)

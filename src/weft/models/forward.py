"""Calls a model, which may be a custom model, with the inputs that a training objective defines."""

from __future__ import annotations

import inspect
from collections.abc import Callable
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


def forward_of(model: nn.Module, *, normalizers: bool = False) -> Callable[[dict[str, Any]], torch.Tensor]:
    """Returns a function that calls a model with a dict of inputs (`tokens`, ...) and returns the model's outputs.

    A custom model only needs to map tokens `[batch, seq]` to logits `[batch, seq, vocab]`. Its `forward` gets
    `positions`, `segments` and `labels` if it has these arguments. If it has no argument `labels`, the returned
    function computes the labels' log-probabilities from the logits. So it does for `logits_function`, a function of
    chunks of logits as in `weft.kernels.map_logits`, and for `temperature`, which divides logits.

    Args:
        normalizers: whether calls with `labels` return normalizers, too (`return_normalizers`).

    Raises:
        UserError: raised by the returned function if the inputs have `segments`, but the model's `forward` has no such
            argument; or if they have a `temperature`, and the model has no such argument and returns no logits.
    """
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    from_logits = not return_normalizers(model) if normalizers else "labels" not in parameters

    def call(inputs: dict[str, Any]) -> torch.Tensor:
        if takes_all:
            return model(**inputs)
        if inputs.get("segments") is not None and "segments" not in parameters:
            name = type(model).__name__.removeprefix("FSDP")
            raise UserError(
                f"{name}.forward has no argument `segments`, so attention would cross documents; add the argument, or "
                "set data.packing to concatenate and data.document_attention to false"
            )
        temperature, labels = inputs.get("temperature", 1.0), inputs.get("labels")
        divides = temperature != 1.0 and "temperature" not in parameters
        if divides and "labels" in parameters and parameters["labels"].default is inspect.Parameter.empty:
            name = type(model).__name__.removeprefix("FSDP")
            raise UserError(
                f"{name}.forward requires `labels` and has no argument `temperature`, so logits cannot be divided by "
                f"{temperature}; add the argument, or return logits if `labels` is None"
            )
        left = ("tokens", "labels") if from_logits or divides else ("tokens",)
        accepted = {k: v for k, v in inputs.items() if k in parameters and k not in left}
        outputs = model(inputs["tokens"], **accepted)
        if divides:
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32)) / temperature
        function = inputs.get("logits_function")
        if function is not None and "logits_function" not in parameters:
            logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).flatten(0, 1)
            return function(logits, slice(0, len(logits))).unflatten(0, outputs.shape[:2])
        if "labels" not in left or labels is None:
            return outputs
        return logprobs_of_logits(outputs, labels, normalizers=normalizers)

    return call

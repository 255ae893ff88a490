"""One way to ask any model for what an objective needs, built in or the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.errors import UserError
from weft.kernels.cross_entropy import logprobs_of_logits


def forward_of(model: nn.Module) -> Callable[[dict[str, Any]], torch.Tensor]:
    """The call that gives an objective's outputs: the model's own if it takes `labels`, else through its logits.

    A model of the user's own need only map tokens `[batch, seq]` to logits `[batch, seq, vocab]`; of `positions`,
    `segments` and `labels` it gets what its `forward` names.

    Raises:
        UserError: (the call) the batch keeps documents apart, and the model takes no `segments`.
    """
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def call(inputs: dict[str, Any]) -> torch.Tensor:
        if takes_all:
            return model(**inputs)
        if inputs.get("segments") is not None and "segments" not in parameters:
            name = type(model).__name__.removeprefix("FSDP")
            raise UserError(
                f"{name}.forward takes no segments, so it cannot keep documents apart; add the argument, or set "
                "data.packing to concatenate and data.document_attention to false"
            )
        named = {k: v for k, v in inputs.items() if k in parameters and k != "tokens"}
        if "labels" in parameters:
            return model(inputs["tokens"], **named)
        logits = model(inputs["tokens"], **named)
        return logits if inputs.get("labels") is None else logprobs_of_logits(logits, inputs["labels"])

    return call

"""Defines `State`, the state of a run that callbacks and metrics receive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.config.run import RunConfig
from weft.data.batches.batch import Batch
from weft.errors import UserError
from weft.observe.metrics import NAMES
from weft.parallel.ranks import error_on_all_ranks
from weft.train.stop import StopRequest


@dataclass
class State:
    """The state of a run on this rank.

    Attributes:
        config: the resolved config.
        path: the run directory.
        rank: the rank of this process.
        ranks: the number of ranks (world size).
        model: the sharded model; a pipeline rank has the parameters of its stages.
        optimizer: the optimizer of the model's parameters.
        step: number of updates so far.
        steps: number of updates of the complete run; None if the run has no length (see `Trainer.step`).
        weights_replaced: a function that a callback must call, on all ranks, after it has changed weights.
        batch: this rank's sequences of the last global batch, on the CPU; None before the first step.
        loss: the loss of the last step; None before the first step.
        updated: whether the last step changed the weights; False after an overflow of float16.
        logged: whether metrics are written for this step because of `log.every`. They are always written for a step
            with a validation.
        metrics: the metrics of the step so far: `loss`, `lr`, `grad_norm`, ..., and `validation_loss` after a
            validation.
        status: "finished", "stopped" (by a signal), "stopped-early", "non-finite", "spike" or "corruption"; None
            before the end of the run.
    """

    config: RunConfig
    path: Path
    rank: int
    ranks: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int
    steps: int | None
    stop: StopRequest
    weights_replaced: Callable[[], None]
    batch: Batch | None = None
    loss: float | None = None
    updated: bool = True
    logged: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    status: str | None = None
    _source: str = "weft"

    def request_stop(self, reason: str) -> None:
        """Stops the run after this step, with a checkpoint. A request on one rank stops all ranks."""
        if self.stop.reason is None:
            self.stop.reason = reason

    def log(self, values: Mapping[str, float | torch.Tensor]) -> None:
        """Adds numbers to the metrics of the step. Only the numbers of the first rank are written.

        Raises:
            UserError: a name is already used, or a value is not a number.
        """
        for name, value in values.items():
            if name in self.metrics or name.startswith("validation_"):
                raise self.mistake(f"{self._source} logs {name!r}, a name that is already used; choose another")
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, bool) or not isinstance(value, int | float):
                what = f"{self._source} logs {name!r}, which must be a number but is a {type(value).__name__}"
                raise self.mistake(what)
            self.metrics[name] = value

    def mistake(self, text: str) -> UserError:
        """Returns a UserError for a mistake that all ranks find and raise. Only the first rank prints it."""
        return error_on_all_ranks(text)

    @contextmanager
    def acting(self, source: str) -> Iterator[None]:
        """Context in which the error messages of `log` name `source` as the component that called `log`."""
        before, self._source = self._source, source
        yield
        self._source = before


def raise_if_taken(source: str, names: tuple[str, ...], others: tuple[str, ...] = ()) -> None:
    """Raises UserError if a name in `names` occurs twice, is in `others`, or is reserved for built-in metrics.

    Args:
        source: the component that declares `names`, for the message.
    """
    for number, name in enumerate(names):
        if name in NAMES or name.startswith("validation_") or name in others or name in names[:number]:
            raise UserError(f"{source} logs {name!r}, a name that is already used; choose another")

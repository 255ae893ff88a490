"""The state of a run that callbacks and metrics get, and what they may ask of the run."""

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
    """A run, as every rank sees it.

    Attributes:
        config: the resolved config.
        path: the run directory.
        model, optimizer: the model is sharded; a pipeline rank has the parameters of its stages.
        step: updates made so far.
        steps: updates of the complete run.
        weights_replaced: to be called, on all ranks, after a callback has set weights.
        batch: this rank's sequences of the global batch of the step, on the CPU; None before the first step.
        loss: of the last step; None before the first.
        updated: whether the last step changed the weights: False if float16 overflowed.
        logged: whether `log.every` has a line of metrics for this step. A step with a validation has one anyway.
        metrics: that line so far: `loss`, `lr`, `grad_norm`, ..., and `validation_loss` after a validation.
        status: how the run ended: "finished", "stopped" (by a signal), "stopped-early" or "non-finite"; None before.
    """

    config: RunConfig
    path: Path
    rank: int
    ranks: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int
    steps: int
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
        """Ends the run after this step, with a checkpoint; a request on one rank stops all ranks."""
        if self.stop.reason is None:
            self.stop.reason = reason

    def log(self, values: Mapping[str, float | torch.Tensor]) -> None:
        """Adds numbers to the metrics of the step. Those of the first rank are written.

        Raises:
            UserError: a name is taken, or a value is not a number.
        """
        for name, value in values.items():
            if name in self.metrics or name.startswith("validation_"):
                raise self.mistake(f"{self._source} logs {name!r}, a name that is taken; choose another")
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, bool) or not isinstance(value, int | float):
                what = f"{self._source} logs {name!r}, which must be a number and is {type(value).__name__}"
                raise self.mistake(what)
            self.metrics[name] = value

    def mistake(self, text: str) -> UserError:
        """Returns an error to raise for a mistake that all ranks find; the first rank reports it."""
        return error_on_all_ranks(text)

    @contextmanager
    def acting(self, source: str) -> Iterator[None]:
        """Names in messages who logs within the context."""
        before, self._source = self._source, source
        yield
        self._source = before


def raise_if_taken(source: str, names: tuple[str, ...], others: tuple[str, ...] = ()) -> None:
    """Raises UserError if declared metrics have names of built-in metrics, or of `others`."""
    for number, name in enumerate(names):
        if name in NAMES or name.startswith("validation_") or name in others or name in names[:number]:
            raise UserError(f"{source} logs {name!r}, a name that is taken; choose another")

"""What callbacks and metrics are given: where the run stands, and the few things that they may ask of it."""

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
from weft.parallel.ranks import mistake
from weft.train.stop import StopRequest


@dataclass
class State:
    """A run, as every rank sees it.

    Attributes:
        config: the resolved run file.
        path: the run directory.
        rank, ranks: which process this is, and of how many.
        model, optimizer: the model is sharded; a rank of a pipeline has the parameters of its stages.
        step: updates made so far.
        steps: updates of the whole run.
        stop: who asked the run to stop; `request_stop` does.
        weights_replaced: to be called, on all ranks, after a callback has set weights.
        batch: this rank's rows of the step's global batch, on the host; None before the first step.
        loss: of the last step; None before the first.
        updated: whether the last step changed the weights: False where float16 overflowed.
        logged: whether a line of metrics is written for this step as far as `log.every` says. A step with a validation
            has one anyway.
        metrics: that line so far: `loss`, `lr`, `grad_norm`, ..., and `validation_loss` once there was a validation.
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
        """End the run after this step, with a checkpoint, on all ranks; one rank's request is enough."""
        if self.stop.reason is None:
            self.stop.reason = reason

    def log(self, values: Mapping[str, float | torch.Tensor]) -> None:
        """Add numbers to the step's line of metrics, for `metrics.jsonl`, the trackers and the report.

        The first rank's are written.

        Raises:
            UserError: a name that is taken, or a value that is no number.
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
        """An error to raise for a mistake of the user's that all ranks find; the first rank reports it."""
        return mistake(text)

    @contextmanager
    def acting(self, source: str) -> Iterator[None]:
        """Name who logs, for messages."""
        before, self._source = self._source, source
        yield
        self._source = before


def raise_if_taken(source: str, names: tuple[str, ...], others: tuple[str, ...] = ()) -> None:
    """Raises UserError if metrics that are declared have names that Weft, or `others`, log."""
    for number, name in enumerate(names):
        if name in NAMES or name.startswith("validation_") or name in others or name in names[:number]:
            raise UserError(f"{source} logs {name!r}, a name that is taken; choose another")

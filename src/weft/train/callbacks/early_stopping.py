"""Early stopping: ends the run when a validation metric no longer improves."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from annotated_types import Ge

from weft.train.callbacks import Callback, State


class EarlyStopping(Callback):
    """Stops the run after `patience` consecutive validations without an improvement. The run ends with a checkpoint.

    Args:
        patience: number of consecutive validations without an improvement after which the run stops.
        min_delta: minimum improvement. A value is an improvement if it is better than the best value by more than
            `min_delta`.
        metric: name of the validation metric.
        mode: `min`: lower values of the metric are better; `max`: higher values are, such as those of
            `validation_reward`.
    """

    def __init__(
        self,
        *,
        patience: Annotated[int, Ge(1)] = 3,
        min_delta: Annotated[float, Ge(0)] = 0.0,
        metric: str = "validation_loss",
        mode: Literal["min", "max"] = "min",
    ):
        self.patience, self.min_delta, self.metric = patience, min_delta, metric
        self.sign = 1.0 if mode == "min" else -1.0
        self.best, self.waited = math.inf, 0  # `best` is multiplied by `sign`

    def begin(self, state: State) -> None:
        """Stops a resumed run that was stopped early, unless `patience` was raised."""
        if state.config.data.validation is None:
            raise state.mistake("callbacks: early_stopping needs validations; set data.validation")
        self._stop_if_due(state)

    def validated(self, state: State) -> None:
        """Compares the metric with the best value so far. Stops the run if `patience` is exhausted."""
        found = [name for name in state.metrics if name.startswith("validation_")]
        if self.metric not in found:
            what = f"early_stopping.metric: validations have no metric {self.metric!r}"
            raise state.mistake(f"callbacks: {what}; use one of {', '.join(found)}")
        value = self.sign * float(state.metrics[self.metric])
        if value < self.best - self.min_delta:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        self._stop_if_due(state)

    def _stop_if_due(self, state: State) -> None:
        if self.waited >= self.patience:
            best = self.sign * self.best
            state.request_stop(f"{self.metric} has not improved on {best:.4f} in {self.waited} validations")

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value of the metric, and the number of validations since the best value."""
        return {"best": self.best if math.isfinite(self.best) else None, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the best value of the metric, and the number of validations since the best value."""
        self.best = math.inf if state["best"] is None else float(state["best"])
        self.waited = int(state["waited"])

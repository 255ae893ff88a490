"""Defines custom metrics (`log.metrics`), computed from the state of a run or the outputs of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch

from weft.config.components import make_component
from weft.config.run import MetricSection
from weft.data.batches.batch import Batch
from weft.errors import UserError
from weft.parallel.objective import Loss, Objective, Pair, check_pairs, quotients
from weft.parallel.world import World
from weft.train.callbacks import Callback
from weft.train.state import State, raise_if_taken


class Metric(Protocol):
    """The interface of custom metrics.

    `scalars` lists the names of the values that the metric logs. A metric has `step`, `outputs` or both.
    """

    scalars: Sequence[str]

    def step(self, state: State) -> Mapping[str, float | Pair]:
        """Returns the values of a logged step by name. Called on every rank.

        A value is a number or a pair (sum, weight). Numbers are written as rank 0 returns them; the numbers of other
        ranks are ignored. Pairs are summed over the data-parallel ranks, and sum / weight is written.
        """
        ...

    def outputs(self, outputs: torch.Tensor, batch: Batch) -> Mapping[str, Pair]:
        """Returns name -> pair (sum, weight) for one micro-batch of training or validation.

        Receives the same arguments as the objective's `loss`, but `outputs` has no gradient and no normalizers.
        """
        ...


class Metrics(Callback):
    """The callback that logs the metrics of `log.metrics`.

    Args:
        sections: the entries of `log.metrics`.
        objective: the objective of the run. Metrics and the objective's scalars must have different names.

    Attributes:
        objective: the objective of the run, extended to compute the metrics that have `outputs`.
    """

    def __init__(self, sections: Sequence[MetricSection], objective: Objective, world: World):
        self.world = world
        self.found: dict[str, Any] = {}
        taken = tuple(getattr(objective, "scalars", ()))
        raise_if_taken(f"objective: {type(objective).__name__}", taken)
        for number, section in enumerate(sections):
            metric = make_component(section, "metric")
            label = f"log.metrics[{number}] ({section.type})"
            names = getattr(metric, "scalars", None)
            if isinstance(names, str) or not isinstance(names, Sequence) or not names:
                raise UserError(f"{label}: `scalars` must list the names that the metric logs, such as ('accuracy',)")
            raise_if_taken(label, tuple(names), taken)
            taken += tuple(names)
            self.found[label] = metric
        observers = {label: metric for label, metric in self.found.items() if hasattr(metric, "outputs")}
        if observers and hasattr(objective, "compute"):
            first = next(iter(observers))
            raise UserError(
                f"{first}: the method `outputs` is not supported, because the objective has the method `compute`; "
                "remove the metric, and return its values from `compute` in `Loss.scalars`"
            )
        self.objective = cast(Objective, ObservedObjective(objective, observers)) if observers else objective

    def step(self, state: State) -> None:
        """Calls the method `step` of each metric that defines it, and logs the values. Uses one all-reduce."""
        if not state.logged:
            return
        pairs: dict[str, Pair] = {}
        for label, metric in self.found.items():
            if not hasattr(metric, "step"):
                continue
            values = metric.step(state)
            _check_names(label, metric, values, "step", "outputs")
            check_pairs(label, {name: value for name, value in values.items() if isinstance(value, tuple)})
            with state.acting(label):
                state.log({name: value for name, value in values.items() if not isinstance(value, tuple)})
            pairs |= {name: value for name, value in values.items() if isinstance(value, tuple)}
        if pairs:
            sums = self.world.sum(*(part for pair in pairs.values() for part in pair))
            state.log(quotients(tuple(pairs), sums))


class ObservedObjective:
    """Wraps an objective: the method `loss` also calls the metrics' `outputs`, and adds their values as scalars.

    Args:
        metrics: label for messages -> metric that has `outputs`.
    """

    def __init__(self, objective: Objective, metrics: Mapping[str, Any]):
        self._objective, self._metrics = objective, metrics
        names = tuple(name for metric in metrics.values() for name in metric.scalars)
        self.scalars = (*getattr(objective, "scalars", ()), *names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        found = self._objective.loss(outputs, batch)
        loss = found if isinstance(found, Loss) else Loss(found)
        if getattr(self._objective, "normalizers", False):
            outputs = outputs[..., 0]
        scalars = dict(loss.scalars)
        with torch.no_grad():
            for label, metric in self._metrics.items():
                values = metric.outputs(outputs.detach(), batch)
                _check_names(label, metric, values, "outputs", "step")
                check_pairs(label, values)
                scalars |= values
        return Loss(loss.sum, scalars)


def _check_names(label: str, metric: Metric, values: Mapping[str, Any], method: str, other_method: str) -> None:
    """Raises UserError if a method did not return a dict with the names in `scalars`.

    Names may be missing if the metric also has `other_method`, which can return them.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{label}: `{method}` must return a dict of names and values, not a {type(values).__name__}")
    if other := values.keys() - set(metric.scalars):
        raise UserError(f"{label} logs {sorted(other)[0]!r}, which is not in its `scalars`; add the name")
    if (missing := [name for name in metric.scalars if name not in values]) and not hasattr(metric, other_method):
        raise UserError(
            f"{label}: `{method}` did not return {missing[0]!r}, which is in its `scalars`; return it, as (0, 0) in a "
            "step without a value, or remove the name"
        )

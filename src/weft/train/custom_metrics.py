"""Custom metrics (`log.metrics`): numbers of a step, from the run's state or from each micro-batch's outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch

from weft.config.component_sections import MetricSection
from weft.config.components import load_class
from weft.data.batches.batch import Batch
from weft.errors import UserError
from weft.parallel.objective import Loss, Objective, Pair, quotients
from weft.parallel.world import World
from weft.train.state import State, raise_if_taken


class Metric(Protocol):
    """What a metric is: `scalars` and one of the methods, or both.

    Attributes:
        scalars: the names that it logs.
    """

    scalars: Sequence[str]

    def step(self, state: State) -> Mapping[str, float | Pair]:
        """Of a step that is logged, on every rank: a number, the first rank's; or a sum and a weight, which are added
        up over the ranks with different rows."""
        ...

    def outputs(self, outputs: torch.Tensor, batch: Batch) -> Mapping[str, Pair]:
        """Of each micro-batch, of validations too: a sum and a weight. Without gradient, with what the objective's
        `loss` gets."""
        ...


class Metrics:
    """The metrics of `log.metrics`.

    Args:
        sections: of the run file.
        objective: reports scalars, too; none of the names are the same.

    Attributes:
        objective: reports what metrics find in outputs as well.
    """

    def __init__(self, sections: Sequence[MetricSection], objective: Objective):
        self.found: dict[str, Any] = {}
        taken = tuple(getattr(objective, "scalars", ()))
        raise_if_taken(f"objective: {type(objective).__name__}", taken)
        for number, section in enumerate(sections):
            metric = load_class(section, "metric")(**section.arguments)
            label = f"log.metrics[{number}] ({section.type})"
            names = getattr(metric, "scalars", None)
            if isinstance(names, str) or not isinstance(names, Sequence) or not names:
                raise UserError(f"{label}: `scalars` must list the names that it logs, as ('accuracy',)")
            raise_if_taken(label, tuple(names), taken)
            taken += tuple(names)
            self.found[label] = metric
        looking = {label: metric for label, metric in self.found.items() if hasattr(metric, "outputs")}
        if looking and hasattr(objective, "compute"):
            first = next(iter(looking))
            raise UserError(f"{first}: the objective has `compute` and keeps its outputs; have it report the scalars")
        self.objective = cast(Objective, Observed(objective, looking)) if looking else objective

    def step(self, state: State, world: World) -> None:
        """Log what metrics find in the state, in one collective."""
        if not state.logged:
            return
        pairs: dict[str, Pair] = {}
        for label, metric in self.found.items():
            if not hasattr(metric, "step"):
                continue
            values = metric.step(state)
            _raise_if_undeclared(label, metric, values)
            with state.acting(label):
                state.log({name: value for name, value in values.items() if not isinstance(value, tuple)})
            pairs |= {name: value for name, value in values.items() if isinstance(value, tuple)}
        if pairs:
            sums = world.sum(*(part for pair in pairs.values() for part in pair))
            state.log(quotients(tuple(pairs), sums))


class Observed:
    """An objective whose outputs are looked at by metrics."""

    def __init__(self, objective: Objective, metrics: Mapping[str, Any]):
        self._objective, self._metrics = objective, metrics
        own = tuple(getattr(objective, "scalars", ()))
        self.scalars = own + tuple(name for metric in metrics.values() for name in metric.scalars)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        """The objective's, and what metrics find."""
        found = self._objective.loss(outputs, batch)
        loss = found if isinstance(found, Loss) else Loss(found)
        scalars = dict(loss.scalars)
        with torch.no_grad():
            for label, metric in self._metrics.items():
                values = metric.outputs(outputs.detach(), batch)
                _raise_if_undeclared(label, metric, values)
                scalars |= values
        return Loss(loss.sum, scalars)


def _raise_if_undeclared(label: str, metric: Metric, values: Mapping[str, Any]) -> None:
    if other := values.keys() - set(metric.scalars):
        raise UserError(f"{label} logs {sorted(other)[0]!r}, which its `scalars` lacks; add the name")

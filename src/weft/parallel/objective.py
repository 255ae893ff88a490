"""The interface of objectives, built-in and custom, to the forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from weft.data.batches.batch import Batch
from weft.errors import UserError

Forward = Callable[[Mapping[str, Any]], torch.Tensor]  # the model's arguments -> its outputs
Pair = tuple[float | torch.Tensor, float | torch.Tensor]  # a sum and its weight


@dataclass(frozen=True)
class Loss:
    """A loss with named scalars, which `Objective.loss` may return instead of the sum.

    Attributes:
        sum: of what `Objective.weight` counts, a scalar tensor.
        scalars: name -> (sum, weight) of these sequences. Both are summed over micro-batches and ranks; the quotient
            is in the step's metrics. Names must be among the objective's `scalars`.
    """

    sum: torch.Tensor
    scalars: Mapping[str, Pair] = field(default_factory=dict)


class Objective(Protocol):
    """Computes the model's `inputs`, and the `loss` of its outputs: a sum, divided by the `weight` of the global batch.

    So results do not depend on micro-batches or ranks.

    Optional attributes of the class or the object:

    - `fields`: name -> `weft.objectives.Field`, fields of samples other than tokens (`batch.extra`).
    - `sequences_per_sample`: 2 for a pair, more for a group.
    - `scalars`: names of scalars that `loss` reports.

    Optional methods:

    - `prepare(forward, batch) -> dict` runs before each step's forwards, without gradient and dropout. Its results are
      in `batch.extra` when `inputs` and `loss` are called. `forward(inputs)` calls the model.
    - `compute(forward, batch) -> Tensor | Loss` replaces `inputs` and `loss`; it may call the model several times, with
      gradient. Not with a pipeline, whose schedule calls the model.
    """

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """The model's arguments: `tokens`, `positions`, `segments` and, for their log-probabilities, `labels`."""
        ...

    def weight(self, batch: Batch) -> torch.Tensor:
        """How much the batch counts: tokens, sequences or pairs. A scalar."""
        ...

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor | Loss:
        """The sum over what `weight` counts. `outputs`: log-probabilities `[batch, seq]`; without `labels`, logits."""
        ...


class Totals:
    """Sums of the loss and of named scalars over batches, in one vector: the loss, then a sum and a weight per name.

    Attributes:
        names: of the scalars, the same on all ranks.
        vector: float64 `[1 + 2 x names]`.
    """

    def __init__(self, names: Sequence[str], device: torch.device):
        self.names = tuple(names)
        self.vector = torch.zeros(1 + 2 * len(self.names), dtype=torch.float64, device=device)

    def add(self, found: torch.Tensor | Loss) -> torch.Tensor:
        """Adds what an objective returned; returns its sum, for backward.

        Raises:
            UserError: the loss is not a scalar tensor, or has a scalar that is not declared.
        """
        loss, scalars = (found.sum, found.scalars) if isinstance(found, Loss) else (found, {})
        if not isinstance(loss, torch.Tensor) or loss.dim():
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise UserError(f"objective: the loss must be a tensor without dimensions, the sum, not {what}")
        if other := scalars.keys() - set(self.names):
            name = sorted(other)[0]
            raise UserError(f"objective: the loss reports {name!r}, which is not in `scalars` of the class; add it")
        self.vector[0] += loss.detach()
        for number, name in enumerate(self.names):
            for offset, value in enumerate(scalars.get(name, ())):
                value = value.detach() if isinstance(value, torch.Tensor) else value
                self.vector[1 + 2 * number + offset] += value
        return loss


def quotients(names: Sequence[str], pairs: Sequence[float]) -> dict[str, float]:
    """`sum / weight` by name, from alternating sums and weights. Names with weight 0 are left out."""
    found = zip(names, pairs[::2], pairs[1::2], strict=True)
    return {name: total / weight for name, total, weight in found if weight}

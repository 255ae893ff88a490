"""What the forward and backward passes ask of an objective: the interface of built-in and custom ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from weft.data.batches.batch import Batch
from weft.errors import UserError

Forward = Callable[[Mapping[str, Any]], torch.Tensor]  # the model's arguments -> its outputs
Pair = tuple[float | torch.Tensor, float | torch.Tensor]  # a sum, and what it is to be divided by


@dataclass(frozen=True)
class Loss:
    """What `Objective.loss` may return in place of the sum alone.

    Attributes:
        sum: of what `Objective.weight` counts, a scalar tensor.
        scalars: name -> (sum, weight) of these rows. Sums and weights are added up over micro-batches and ranks; the
            quotient is in the step's metrics. All names are among the objective's `scalars`.
    """

    sum: torch.Tensor
    scalars: Mapping[str, Pair] = field(default_factory=dict)


class Objective(Protocol):
    """The training loop asks for the model's `inputs`, hands its outputs to `loss`, and divides the sum by the `weight`
    of the *global* batch: the result does not depend on how a batch was cut into micro-batches or over ranks.

    Optional attributes of the class or the object:

    - `fields`: name -> `weft.objectives.Field`, what samples have beside their tokens (`batch.extra`).
    - `sequences_per_sample`: 2 for a pair, more for a group.
    - `scalars`: names of what `loss` reports beside the loss.

    Optional methods:

    - `prepare(forward, batch) -> dict` runs before each step's forwards, without gradient and dropout. What it returns
      is in `batch.extra` when `inputs` and `loss` are called. `forward(inputs)` calls the model.
    - `compute(forward, batch) -> Tensor | Loss` in place of `inputs` and `loss`: may call the model several times, with
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
    """The loss and the named scalars of some batches, added up in one vector: the loss, then a sum and a weight each.

    Attributes:
        names: of the scalars, alike on all ranks.
        vector: float64 `[1 + 2 x names]`.
    """

    def __init__(self, names: Sequence[str], device: torch.device):
        self.names = tuple(names)
        self.vector = torch.zeros(1 + 2 * len(self.names), dtype=torch.float64, device=device)

    def add(self, found: torch.Tensor | Loss) -> torch.Tensor:
        """Add what an objective returned; gives its sum, for backward.

        Raises:
            UserError: it is no loss, or has a scalar of another name.
        """
        loss, scalars = (found.sum, found.scalars) if isinstance(found, Loss) else (found, {})
        if not isinstance(loss, torch.Tensor) or loss.dim():
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise UserError(f"objective: the loss is to be a tensor without dimensions, the sum, and is {what}")
        if other := scalars.keys() - set(self.names):
            raise UserError(f"objective: the loss reports {sorted(other)[0]!r}, which `scalars` of the class lacks")
        self.vector[0] += loss.detach()
        for number, name in enumerate(self.names):
            for place, value in enumerate(scalars.get(name, ())):
                value = value.detach() if isinstance(value, torch.Tensor) else value
                self.vector[1 + 2 * number + place] += value
        return loss


def quotients(names: Sequence[str], pairs: Sequence[float]) -> dict[str, float]:
    """`sum / weight` by name, of sums and weights in turn; names that nothing counted for are left out."""
    found = zip(names, pairs[::2], pairs[1::2], strict=True)
    return {name: total / weight for name, total, weight in found if weight}

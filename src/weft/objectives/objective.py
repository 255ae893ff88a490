"""What is learned: the interface that every objective, built in or the user's own, meets."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from weft.data.batches.batch import Batch


class Objective(Protocol):
    """The training loop asks for the model's `inputs`, hands its outputs to `loss`, and divides the sum by the `weight`
    of the *global* batch: the result does not depend on how a batch was cut into micro-batches or over ranks."""

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """The model's arguments: `tokens`, `positions`, `segments` and, for their log-probabilities, `labels`."""
        ...

    def weight(self, batch: Batch) -> torch.Tensor:
        """How much the batch counts: tokens, sequences or pairs. A scalar."""
        ...

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The sum over what `weight` counts. `outputs`: log-probabilities `[batch, seq]`; without `labels`, logits."""
        ...

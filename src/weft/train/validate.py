"""The loss on held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from weft.data.batches.batch import Batch
from weft.objectives.objective import Objective
from weft.parallel.world import World


@torch.no_grad()
def validate(
    model: nn.Module,
    forward: Callable[[dict[str, Any]], torch.Tensor],
    objective: Objective,
    batches: Iterable[Batch],
    world: World,
    *,
    bytes_per_token: float | None = None,
) -> dict[str, float]:
    """The objective's loss over all of `batches`, by all ranks, with dropout off.

    Returns:
        `validation_loss` (nats per token) and, with `bytes_per_token`, `validation_bits_per_byte`.
    """
    model.eval()
    loss, weight = 0.0, 0.0
    for batch in batches:
        batch = batch.to(world.device)
        loss += objective.loss(forward(objective.inputs(batch)), batch).item()
        weight += objective.weight(batch).item()
    model.train()
    loss, weight = world.sum(loss, weight)
    mean = loss / weight if weight else 0.0
    result = {"validation_loss": mean}
    if bytes_per_token:
        result["validation_bits_per_byte"] = mean / math.log(2) / bytes_per_token
    return result

"""The loss on held-out data."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from weft.data.batches.batch import Batch
from weft.evaluate.bits import BytesPerToken, bits_per_byte
from weft.parallel.passes import Passes
from weft.parallel.world import World


@torch.no_grad()
def validate(
    model: nn.Module,
    passes: Passes,
    batches: Iterable[Batch],
    world: World,
    *,
    bytes_per_token: BytesPerToken | None = None,
) -> dict[str, float]:
    """The objective's loss over all of `batches`, by all ranks, with dropout off.

    Bits per byte are the bits of the tokens that are predicted, those that end documents among them, divided by the
    bytes of the predicted tokens of text. What is not predicted (a document's first token where documents are kept
    apart, what a loss mask leaves out) counts on neither side; a token of text has the store's mean number of bytes.

    Returns:
        `validation_loss` (nats per token) and, with `bytes_per_token`, `validation_bits_per_byte`.
    """
    model.eval()
    loss, weight, learned, text = 0.0, 0.0, 0.0, 0.0
    for batch in batches:
        loss += passes.evaluate(batch).item()
        weight += float(passes.objective.weight(batch))
        if bytes_per_token is not None:
            learned += batch.weight.sum(dtype=torch.float64).item()
            text += batch.weight[batch.labels != bytes_per_token.eod_id].sum(dtype=torch.float64).item()
    model.train()
    loss, weight, learned, text = world.sum(loss, weight, learned, text)
    mean = loss / weight if weight else 0.0
    result = {"validation_loss": mean}
    if bytes_per_token is not None and text:
        result["validation_bits_per_byte"] = bits_per_byte(mean * learned, text * bytes_per_token.mean)
    return result

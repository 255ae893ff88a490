"""The loss on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from weft.data.batches.batch import Batch
from weft.data.batches.loader import ValidationBatches
from weft.evaluation.bits import BytesPerToken, bits_per_byte
from weft.parallel.objective import quotients
from weft.parallel.passes import Passes
from weft.parallel.world import World
from weft.train.data import HeldOut


def validate(
    model: nn.Module,
    passes: Passes,
    held_out: Sequence[HeldOut],
    world: World,
    *,
    whole: bool,
    show: Callable[[ValidationBatches], Iterable[Batch]] = iter,
) -> dict[str, float]:
    """The objective's loss on all held-out sets together, by all ranks, with dropout off; and, of several, on each.

    Bits per byte are the bits of the tokens that are predicted, those that end documents among them, divided by the
    bytes of the predicted tokens of text. What is not predicted (a document's first token where documents are kept
    apart, what a loss mask leaves out) counts on neither side; a token of text has the store's mean number of bytes.

    Args:
        whole: all of every set; else as much of each as `validation.tokens` says.
        show: gives the batches, and shows how far a long validation is.

    Returns:
        `validation_loss` (nats per token), `validation_bits_per_byte` where the bytes are known, and `validation_NAME`
        of each scalar that the objective reports; of each of several sets as `validation_loss/NAME` and so on.
    """
    sums = [
        measure(model, passes, show(one.whole if whole else one.some), world, one.bytes_per_token) for one in held_out
    ]
    loss, weight, nats, size, *scalars = map(sum, zip(*sums, strict=True))
    sizes_known = all(size for _, _, _, size, *_ in sums)
    metrics = named(passes.scalars, [loss, weight, nats, size if sizes_known else 0.0, *scalars])
    for one, found in zip(held_out, sums, strict=True):
        if one.name:
            metrics |= {f"{key}/{one.name}": value for key, value in named(passes.scalars, found).items()}
    return metrics


def named(scalars: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """The quotients of what `measure` added up."""
    loss, weight, nats, size, *pairs = sums
    found = {"validation_loss": loss / weight if weight else 0.0}
    if size:
        found["validation_bits_per_byte"] = bits_per_byte(nats, size)
    return found | {f"validation_{name}": value for name, value in quotients(scalars, pairs).items()}


@torch.no_grad()
def measure(
    model: nn.Module, passes: Passes, batches: Iterable[Batch], world: World, bytes_per_token: BytesPerToken | None
) -> list[float]:
    """Add up, over all ranks: the loss, its weight, the nats of predicted tokens, the bytes of text that they are (0 if
    they are not known), and a sum and a weight of each scalar."""
    model.eval()
    totals = torch.zeros(1 + 2 * len(passes.scalars), dtype=torch.float64)
    weight, learned, text = 0.0, 0.0, 0.0
    for batch in batches:
        totals += passes.evaluate(batch).cpu()
        weight += float(passes.objective.weight(batch))
        if bytes_per_token is not None:
            learned += batch.weight.sum(dtype=torch.float64).item()
            text += batch.weight[batch.labels != bytes_per_token.eod_id].sum(dtype=torch.float64).item()
    model.train()
    loss, *pairs, weight, learned, text = world.sum(*totals.tolist(), weight, learned, text)
    nats = loss / weight * learned if weight else 0.0
    return [loss, weight, nats, text * bytes_per_token.mean if bytes_per_token is not None else 0.0, *pairs]

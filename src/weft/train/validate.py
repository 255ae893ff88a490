"""Validates a model: computes the objective's loss and other metrics on held-out data."""

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
    full: bool,
    show: Callable[[ValidationBatches], Iterable[Batch]] = iter,
) -> dict[str, float]:
    """Returns the metrics of all validation sets together and, if the sets have names, of each set. Dropout is off.

    Bits per byte are the bits of the predicted tokens (including end-of-document tokens), divided by the bytes of the
    predicted text tokens. Both exclude tokens that are not predicted: the first token of each document if documents are
    separated, and tokens that a loss mask excludes. Each text token counts as the mean number of bytes per token of the
    store.

    If the objective has a scalar `cross_entropy`, bits per byte are those of this scalar instead of the loss.

    If the objective weighs documents (`Objective.weigh_documents`), each document counts equally in all metrics.

    Args:
        full: whether to evaluate each set completely, instead of only up to `validation.tokens`.
        show: function that iterates over batches and shows the progress.

    Returns:
        `validation_loss` (nats per token), `validation_bits_per_byte` if the bytes are known, and `validation_NAME` for
        each scalar of the objective. For each named set, the same metrics with the name of the set as suffix, such as
        `validation_loss/SET`.
    """
    sums = [
        measure(model, passes, show(one.full if full else one.subset), world, one.bytes_per_token) for one in held_out
    ]
    loss, weight, nats, size, *scalars = map(sum, zip(*sums, strict=True))
    sizes_known = all(size for _, _, _, size, *_ in sums)
    metrics = named(passes.scalars, [loss, weight, nats, size if sizes_known else 0.0, *scalars])
    for one, found in zip(held_out, sums, strict=True):
        if one.name:
            metrics |= {f"{key}/{one.name}": value for key, value in named(passes.scalars, found).items()}
    return metrics


def named(scalars: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """Converts the sums that `measure` returns to metrics by name: mean loss, bits per byte, and mean scalars.

    Args:
        scalars: names of the objective's scalars.
    """
    loss, weight, nats, size, *pairs = sums
    found = {"validation_loss": loss / weight if weight else 0.0}
    if size:
        found["validation_bits_per_byte"] = bits_per_byte(nats, size)
    return found | {f"validation_{name}": value for name, value in quotients(scalars, pairs).items()}


@torch.no_grad()
def measure(
    model: nn.Module, passes: Passes, batches: Iterable[Batch], world: World, bytes_per_token: BytesPerToken | None
) -> list[float]:
    """Evaluates batches and returns sums over all ranks.

    Returns:
        Loss, weight, nats of the predicted tokens, bytes of the text of these tokens (0 if unknown), then sum and
        weight of each scalar.
    """
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
    mean = loss / weight if weight else 0.0
    mean = quotients(passes.scalars, pairs).get("cross_entropy", mean)  # of an objective with another loss
    nats = mean * learned
    return [loss, weight, nats, text * bytes_per_token.mean if bytes_per_token is not None else 0.0, *pairs]

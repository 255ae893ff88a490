"""What a plan with pipeline stages must compute: the module on one device, on the batch or on its micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.planner.parallelize.containers import batch_rows, map_tensors
from weft.planner.parallelize.dry_run import loss_of
from weft.planner.parallelize.stage_calls import draw_seed, rows_of_micro_batch, stage_seed

if TYPE_CHECKING:
    from weft.planner.parallelize.plan import Plan

SEED = 0
RANDOM = "random numbers (dropout): compared with the micro-batches on one device, with the same numbers"
NO_MEAN = (
    "equal to the micro-batches on one device, but not to the batch: the loss is not a mean over rows (batch norm, a "
    "contrastive loss, or a mean over unmasked tokens); use a plan without stages, or another loss"
)


def is_here(tensor: torch.Tensor) -> bool:
    """Whether this rank has a parameter: with stages, parameters of other stages have no data here."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def run_on_one_device(plan: Plan, model: nn.Module, args: Any, kwargs: Any, loss: Any) -> tuple[float, str]:
    """Runs forward and backward on one device. Returns the loss, and a remark on how.

    With stages, the loss is the module's own, of the batch. A module that draws random numbers runs in micro-batches,
    because stages draw them so.
    """
    torch.manual_seed(SEED)
    before = torch.get_rng_state()
    given = map_tensors(torch.clone, (args, kwargs))
    out = model(*given[0], **given[1])
    value = loss_of(out, loss) if loss is not None or not plan.stages else out
    if plan.stages and not torch.equal(before, torch.get_rng_state()):
        return run_micro_batches(plan, model, args, kwargs, loss), RANDOM
    value.backward()
    return value.item(), ""


def run_micro_batches(plan: Plan, model: nn.Module, args: Any, kwargs: Any, loss: Callable | None) -> float:
    """Runs the micro-batches of a plan with stages on one device, with the random numbers of the stages.

    Replaces the gradients. Returns the mean of the losses.
    """
    model.zero_grad()
    torch.manual_seed(SEED)
    seed, rows, total = draw_seed(), batch_rows((args, kwargs)) or 0, 0.0
    number = 0
    called: set[tuple[int, int]] = set()

    def seeding(stage: int) -> Callable:
        def hook(*_: Any) -> None:
            if (number, stage) not in called:
                called.add((number, stage))
                torch.manual_seed(stage_seed(seed, stage, number))

        return hook

    handles = [
        model.get_submodule(begin).register_forward_pre_hook(seeding(stage))
        for stage, (begin, _) in enumerate(plan.stages)
    ]
    for number in range(plan.micro_batches):
        own = rows_of_micro_batch(rows, plan.micro_batches, number)
        given = map_tensors(lambda tensor, own=own: own(tensor).clone(), (args, kwargs))
        out = model(*given[0], **given[1])
        value = (out if loss is None else loss(out)) / plan.micro_batches
        value.backward()
        total += value.item()
    for handle in handles:
        handle.remove()
    return total

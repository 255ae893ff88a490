"""The private names of torch that this package needs alone. `weft.torch_private` has the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule

from weft.torch_private import tree_leaves

# `weft.torch_private.NAMES` gives each of its own a reason.
NAMES = {
    "torch.distributed.fsdp:FSDPModule._set_unshard_async_op": "prefetches on gloo, which has no stream",
    "torch:_C._autograd._top_saved_tensors_default_hooks": "contexts of saved tensors within others, which PyTorch "
    "does not call",
    "torch.distributed._functional_collectives:AsyncCollectiveTensor": "tells whether nothing has waited for a result",
    "torch.autograd:Variable._execution_engine.queue_callback": "moves the gradients of a single rank together",
}


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Calls `function` at the end of the backward pass that autograd's engine is running on this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def all_gather_in_background(model: FSDPModule) -> None:
    """Makes FSDP2 wait for an all-gather when its unit runs, not when it is prefetched.

    On a GPU, an all-gather runs in a stream of its own anyway. On a CPU, each rank otherwise waits for the slowest at
    every unit.
    """
    model._set_unshard_async_op(True)


def hooks_of_saved_tensors() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """Returns the functions of the innermost `saved_tensors_hooks`; None outside of such contexts."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]


def wait_for_received(values: Any) -> None:
    """Waits for the collectives whose results are in nested tuples, lists and dicts."""
    for value in tree_leaves(values):
        if isinstance(value, AsyncCollectiveTensor):
            value.trigger_wait()

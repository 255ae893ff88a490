"""The private name of torch that FSDP2 on CPUs needs. `weft.torch_private` has the others."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule

# `weft.torch_private.NAMES` gives each of its own a reason.
NAMES = {"torch.distributed.fsdp:FSDPModule._set_unshard_async_op": "prefetches on gloo, which has no stream"}


def all_gather_in_background(model: FSDPModule) -> None:
    """Makes FSDP2 wait for an all-gather when its unit runs, not when it is prefetched.

    On a GPU, an all-gather runs in a stream of its own anyway. On a CPU, each rank otherwise waits for the slowest at
    every unit.
    """
    model._set_unshard_async_op(True)

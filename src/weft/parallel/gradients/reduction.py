"""Chooses when the gradients of a step are reduced over the ranks, if `parallel.reduce_gradients` is not set.

Reducing them once per step sends the least, but until then, each rank has unsharded gradients: 32 GB for 8B parameters
in float32.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from weft.config.mesh import UNSHARDED_SHARE
from weft.formatting import byte_size
from weft.parallel.memory.estimate import unsharded_bytes
from weft.parallel.model_state import state_of
from weft.parallel.ranks import all_gather_object
from weft.parallel.world import World
from weft.processes import total_memory


def choose_reduction(model: nn.Module, world: World, kept: str | None = None) -> tuple[str, str] | None:
    """Sets when the gradients of a model are reduced, by the memory of the rank with the least. All ranks must call it.

    The choice changes how sums round, so a resumed run keeps it. The total memory decides, not what is free.

    Args:
        kept: choice of the last session on this mesh, `last` or `every`; None: there is none.

    Returns:
        The choice, `last` or `every`, and a line about it; None if there is none, because the config makes it, or
        gradients are not sharded.
    """
    state = state_of(model)
    if state is None or not isinstance(model, FSDPModule) or world.shape.fsdp == 1:
        return None  # a pipeline reduces gradients once per step
    plan, parallel = state.plan, state.plan.parallel
    if not parallel.reduces_by_memory:
        return None
    if kept is not None:
        state.reduces_every = kept == "every"
        words = "every" if state.reduces_every else "the last"
        return kept, f"gradients are reduced with {words} micro-batch (as in the last session)"
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    needed = unsharded_bytes(trained, world, (plan.reduce_dtype or plan.state_dtype).itemsize)
    needs = all_gather_object((needed, device_memory(world.device)))
    needed, memory = max(needs, key=lambda one: one[0] / one[1])
    state.reduces_every = needed > UNSHARDED_SHARE * memory
    sizes = f"{byte_size(needed)} of the {byte_size(memory)} of a rank"
    if state.reduces_every:
        return "every", f"gradients are reduced with every micro-batch: unsharded, they would take {sizes}"
    return "last", f"gradients are reduced with the last micro-batch: unsharded, they take {sizes}"


def device_memory(device: torch.device) -> int:
    """Returns the bytes of memory of a device; for a CPU, the share of this rank in the memory of its host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return total_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))

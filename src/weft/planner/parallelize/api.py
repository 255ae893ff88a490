"""Defines `parallelize`, which returns the plan of a module for some devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.planner.parallelize.plan import Plan


def parallelize(
    module: nn.Module | Callable[[], nn.Module],
    example_inputs: Any,
    *,
    devices: int,
    hardware: str | None = None,
    memory: str | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
) -> Plan:
    """Returns a plan to run a single-device module on several devices. `plan.apply(module)` carries it out.

    The result depends only on the arguments, so that all ranks of a job get the same plan. The module is not changed.

    >>> module, inputs = torch.nn.Linear(8, 4), torch.zeros(2, 8)
    >>> plan = weft.parallelize(module, inputs, devices=1)
    >>> plan.apply(module)(inputs).shape
    torch.Size([2, 4])

    Args:
        module: the module, or a function without arguments that returns it; parameters can be on the meta device.
        example_inputs: inputs of one call: a tuple of positional arguments, a dict of keyword arguments, or one tensor.
            Dim 0 of the tensors is the batch.
        devices: number of devices.
        hardware: name or path of a hardware file; by default, that of this machine's GPU, or else `h100-sxm`.
        memory: memory of a device that the plan may use, such as `70GB`; by default, 90% of the memory.
        loss: outputs -> loss. Its cost counts; each rank computes the loss from full outputs.

    Raises:
        UserError: the module does not run with the example inputs, the devices cannot share their rows, or the memory
            does not suffice.
    """
    from weft.planner.parallelize.search import search_plan

    plan, _, _ = search_plan(module, example_inputs, devices=devices, hardware=hardware, memory=memory, loss=loss)
    return plan

"""The private names of torch that this package needs alone. `weft.torch_private` has the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule

from weft.torch_private import tree_leaves

_FUNCTIONAL = "torch.distributed._functional_collectives"
_COLLECTIVE = "differentiable, and compiled without a graph break; those of torch.distributed.nn are neither"

# `weft.torch_private.NAMES` gives each of its own a reason.
NAMES = {
    f"{_FUNCTIONAL}:all_to_all_single_autograd": _COLLECTIVE,
    f"{_FUNCTIONAL}:all_reduce": _COLLECTIVE,
    f"{_FUNCTIONAL}:wait_tensor": _COLLECTIVE,
    "torch.distributed.fsdp:FSDPModule._set_unshard_async_op": "prefetches on gloo, which has no stream",
    "torch.distributed.fsdp._fully_shard:_fsdp_param.nn": "shards integers with PyTorch 2.11",
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


# ---- FSDP2


def shard_integers() -> None:
    """Lets FSDP2 shard integer parameters. That of PyTorch 2.11 makes each parameter require a gradient at first."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    if torch.__version__ < "2.12":
        _fsdp_param.nn = _Parameters()  # pyright: ignore[reportPrivateImportUsage]


class _Parameters:
    """`torch.nn`, whose parameters require a gradient by default only if they can."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)

    @staticmethod
    def Parameter(data: torch.Tensor, requires_grad: bool | None = None) -> nn.Parameter:
        return nn.Parameter(data, data.is_floating_point() if requires_grad is None else requires_grad)


# ---- collectives that autograd and torch.compile follow; PyTorch 2.13 has new names for two of them

all_reduce = functional.all_reduce


def wait_tensor(x: torch.Tensor) -> torch.Tensor:
    """Waits for the result of a collective. Returns any other tensor as it is: with PyTorch 2.11, not as a view."""
    return functional.wait_tensor(x) if isinstance(x, AsyncCollectiveTensor) else x


def _all_gather(x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """Never returns a view, as the function of PyTorch 2.11 does: autograd would not let a layer write to it."""
    gathered = functional.all_gather_tensor(x, dim, group)
    return gathered.clone() if dim and x.shape[:dim].numel() == 1 else gathered


def _reduce_scatter(x: torch.Tensor, op: str, dim: int, group: ProcessGroup) -> torch.Tensor:
    """The differentiable function of PyTorch 2.11 has no kernel for inference mode."""
    plain, differentiable = functional.reduce_scatter_tensor, functional.reduce_scatter_tensor_autograd
    return (plain if torch.is_inference_mode_enabled() else differentiable)(x, op, dim, group)


def _all_to_all(
    x: torch.Tensor, received: list[int] | None, sent: list[int] | None, group: ProcessGroup
) -> torch.Tensor:
    """See `_reduce_scatter`."""
    plain, differentiable = functional.all_to_all_single, functional.all_to_all_single_autograd
    return (plain if torch.is_inference_mode_enabled() else differentiable)(x, received, sent, group)


all_gather = getattr(functional, "all_gather_single", None) or _all_gather
reduce_scatter_autograd = getattr(functional, "reduce_scatter_single_autograd", None) or _reduce_scatter
all_to_all_autograd = functional.all_to_all_single_autograd if hasattr(functional, "all_gather_single") else _all_to_all

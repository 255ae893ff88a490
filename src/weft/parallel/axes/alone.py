"""One process alone: nothing is shared out, so nothing is gathered. FSDP2 would copy all the same, and is not asked.

Parameters are DTensors as on any mesh, and forwards compute with what lies beneath them, in the dtype of computing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from weft.config.mesh import ParallelSection
from weft.models.decoder import Decoder
from weft.parallel.world import World


def is_alone(world: World, parallel: ParallelSection, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> bool:
    """Whether there is nothing that FSDP2 would be needed for: nor another home, nor sums in a dtype of their own."""
    summed = (None, torch.promote_types(dtype, torch.float32))
    return world.ranks == 1 and parallel.offload != "parameters" and reduce_dtype in summed


def whole_part(parameter: DTensor, dtype: torch.dtype) -> torch.Tensor:
    """All of a parameter, to compute with. What it gets as a gradient is the parameter's."""
    whole = parameter._local_tensor
    if not torch.is_grad_enabled() or not parameter.requires_grad:
        return _narrow(parameter, whole.detach(), dtype)
    parameter.weft_narrow = None
    leaf = getattr(parameter, "weft_leaf", None)
    if leaf is None or leaf.data_ptr() != whole.data_ptr() or leaf.dtype != whole.dtype:
        leaf = parameter.weft_leaf = whole.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(functools.partial(_hand_over, parameter))
    return leaf.to(dtype)


def _narrow(parameter: DTensor, whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded once for as long as nothing changes it: a validation, or a text that is generated, asks often."""
    if whole.dtype == dtype:
        return whole
    version, kept = getattr(parameter, "weft_narrow", None) or (None, None)
    if version != whole._version or kept.dtype != dtype or kept.device != whole.device:
        version, kept = parameter.weft_narrow = whole._version, whole.to(dtype)
    return kept


def _hand_over(parameter: DTensor, leaf: torch.Tensor) -> None:
    grad, leaf.grad = leaf.grad, None
    if parameter.grad is None:
        parameter.grad = DTensor(grad, parameter._spec, requires_grad=False)  # `from_local` takes 20 times as long
    else:
        parameter.grad._local_tensor.add_(grad)


def widen(model: nn.Module, blocks: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Have the model's outputs, and the decoder's residual stream between its blocks, in the wider dtype."""
    for module in (*blocks, model) if isinstance(model, Decoder) else (model,):
        module.forward = _widened(module.forward, dtype)


def _widened(forward: Callable, dtype: torch.dtype) -> Callable:
    def wide(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    @functools.wraps(forward)
    def call(*arguments, **named):
        return tree_map_only(torch.Tensor, wide, forward(*arguments, **named))

    return call

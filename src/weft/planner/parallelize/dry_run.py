"""Runs a plan without data: counts the collectives of a forward and a backward pass, and their bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.planner.parallelize.containers import map_tensors
from weft.planner.parallelize.torch_private import parameters_of, refresh_flat_weights, replicated, tree_leaves
from weft.torch_private import TorchDispatchMode, fake_ranks

if TYPE_CHECKING:
    from weft.planner.parallelize.plan import Plan

_COLLECTIVES = ("_c10d_functional", "_dtensor")
_WAITS = ("wait_tensor", "_wrap_tensor_autograd")


@dataclass
class Traffic:
    """What a rank communicates in a forward and a backward pass.

    Attributes:
        counts: name of a collective -> number of calls.
        bytes: name of a collective -> bytes of the tensors that this rank passes to it.
        on_full_tensors: functions and operators that ran on full tensors on all ranks: DTensor cannot shard them.
    """

    counts: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    on_full_tensors: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        texts = [f"{count} {name} ({self.bytes[name]} bytes)" for name, count in sorted(self.counts.items())]
        return ", ".join(texts) or "no collectives"


class CountCollectives(TorchDispatchMode):
    """A mode that counts collectives of DTensors, also in backward: `with CountCollectives() as found: ...`."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # its local operators come here again
        name = func.overloadpacket.__name__
        if func.namespace in _COLLECTIVES and name not in _WAITS:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            sizes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
            self.traffic.counts[name] = self.traffic.counts.get(name, 0) + 1
            self.traffic.bytes[name] = self.traffic.bytes.get(name, 0) + sizes
        return func(*args, **(kwargs or {}))


def loss_of(out: Any, loss: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
    """Returns the loss of a module's outputs: by default, a weighted mean of all floating-point outputs, added up."""
    if loss is not None:
        return loss(out)
    found: list[torch.Tensor] = []

    def weigh(value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point():
            weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=value.device)
            found.append((value * weights.view(value.shape)).sum() / max(value.numel(), 1))
        return value

    map_tensors(weigh, out)
    return torch.stack([one.to(found[0].dtype) for one in found]).sum()


def on_meta(module: nn.Module) -> nn.Module:
    """Replaces all tensors of a module by tensors on the meta device, in place. Tied parameters stay tied."""
    made: dict[torch.Tensor, nn.Parameter] = {}
    for one in module.modules():
        for name, old in list(parameters_of(one).items()):
            if old is not None:
                new = (
                    made[old] if old in made else nn.Parameter(torch.empty_like(old, device="meta"), old.requires_grad)
                )
                parameters_of(one)[name] = made[old] = new
        for name, buffer in list(one.named_buffers(recurse=False)):
            setattr(one, name, buffer.to("meta"))
        refresh_flat_weights(one)
    return module


def dry_run(
    plan: Plan,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[..., torch.Tensor] | None = None,
) -> Traffic:
    """Returns what the first rank communicates in a forward and a backward pass. No data is moved, and no values exist.

    The process must have no process group.

    Args:
        module: the module; its tensors are replaced by tensors on the meta device, and `Plan.apply` changes it.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        loss: outputs -> loss.

    Raises:
        RuntimeError: the operations of the module depend on values of tensors, so they are unknown without data.
    """
    args, kwargs = map_tensors(lambda value: value.to("meta"), (args, kwargs))
    with fake_ranks(plan.devices):
        model = plan.apply(on_meta(module), without_data=True)
        before = len(replicated)
        with CountCollectives() as mode:
            loss_of(model(*args, **kwargs), loss).backward()
        mode.traffic.on_full_tensors = list(dict.fromkeys(name for name, _ in replicated[before:]))
    return mode.traffic

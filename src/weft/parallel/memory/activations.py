"""Activation checkpointing (Chen et al., "Training deep nets with sublinear memory cost", 2016), block by block.

What operations leave for backward is most of a step's memory. A checkpointed block keeps its input and, of some
operations, the results; backward runs its forward again, taking those in place of computing them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from weft.errors import UserError
from weft.parallel.memory.budget import ATTENTION, Key, choose, draws, name_of
from weft.torch_private import (
    OpOverload,
    TorchDispatchMode,
    detached_with_version,
    set_activation_budget,
    tree_map_only,
    version_of,
)

_EXPENSIVE = ATTENTION | {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm", "aten::_scaled_mm",
    "aten::_scaled_grouped_mm", "aten::convolution", "weft::grouped_linear",
    "_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_reduce", "_c10d_functional::all_to_all_single", "_c10d_functional::broadcast",
}  # fmt: skip


def checkpointed(forward: Callable, mode: str, number: int, of: int, *, compile: bool) -> Callable:
    """A block's forward, that keeps for backward what the mode says. Random numbers are drawn again as they were.

    Args:
        forward: differentiable in its positional arguments and in parameters. What else it uses, it must find in
            backward as it was: parameters that are put in the place of others, that has to be done inside.
        mode: `training.activation_checkpointing`.
        number: the block's, of the model's blocks from 0 to `of` - 1.
        compile: the result will be compiled, as a whole.

    Raises:
        UserError: there are not so many blocks.
    """
    kind, _, amount = mode.partition("-")
    if compile:
        set_activation_budget(float(amount) if kind == "budget" else 1.0, _drawn, __file__)
    if kind == "every":
        if int(amount) > of:
            raise UserError(
                f"training.activation_checkpointing: {mode}, and the model has {of} layers, so none would be "
                "recomputed; lower it, or set none"
            )
        kind = "none" if (number + 1) % int(amount) else "full"
    if kind == "none" or (kind == "budget" and compile):  # the compiler chooses by itself what to keep
        return forward
    if kind == "full":
        return functools.partial(checkpoint, forward, use_reentrant=False)
    if kind == "budget":
        return _Budget(forward, float(amount))
    return functools.partial(checkpoint, forward, use_reentrant=False, context_fn=_selective)


def _drawn(node: torch.fx.Node) -> bool:
    """What the compiler is to keep: to meet a budget it would draw anew (PyTorch 2.13), unlike forward."""
    return draws(node.target, node.args, node.kwargs)


def _expensive(op: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether to keep a result: Korthikanti et al. (2022) the other way round, that have attention computed again."""
    name = name_of(op)
    if name in ("aten::bmm", "aten::baddbmm"):
        # Attention's scores, where no kernel hides them, have more numbers than what they are the products of.
        one, other = [x for x in arguments if isinstance(x, Tensor)][-2:]
        return one.shape[1] * other.shape[2] <= one[0].numel() + other[0].numel()
    return name in _EXPENSIVE and not draws(op, arguments, named)


def _policy(context: Any, op: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    kept = _expensive(op, arguments, named)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _selective() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    if get_proxy_mode() is not None:  # a compiler traces; where it gives a block up, the block runs as it is
        return create_selective_checkpoint_contexts(_policy)
    kept: dict[Key, Any] = {}
    return (
        _Keep(kept, lambda op: name_of(op) in _EXPENSIVE, lambda key, *given: _expensive(key[0], *given)),
        _Give(kept, lambda op: name_of(op) in _EXPENSIVE),
    )


class _Budget:
    """A forward of which about a share of the saved activations is kept, chosen at its first call.

    What is kept is the same in all steps, whatever their shapes; ranks may choose differently.
    """

    def __init__(self, forward: Callable, share: float):
        self.forward, self.share = forward, share
        self.chosen: frozenset[Key] | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.chosen is None and torch.is_grad_enabled():
            self.chosen = choose(self.forward, arguments, named, self.share)
        return checkpoint(self.forward, *arguments, use_reentrant=False, context_fn=self._contexts, **named)

    def _contexts(self) -> tuple[_Keep, _Give]:
        kept: dict[Key, Any] = {}
        chosen = self.chosen or frozenset()
        kinds = {op for op, _ in chosen}
        return (
            _Keep(kept, kinds.__contains__, lambda key, *given: key in chosen and not draws(key[0], *given)),
            _Give(kept, kinds.__contains__),
        )


# ---- PyTorch's own pair of these counts every operation, those of FSDP2's hooks too, which are others in backward; and
# it gives a result once, but schedules that split backward ask for it twice.


class _Counting(TorchDispatchMode):
    """Numbers the operations of each relevant kind, from each entry on."""

    def __init__(self, kept: dict[Key, Any], relevant: Callable[[Any], bool]):
        super().__init__()
        self.kept, self.relevant = kept, relevant
        self.counts: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # a kernel that is compiled by itself, as flex attention, is no operation of ours

    def __enter__(self):
        self.counts.clear()
        return super().__enter__()

    def key(self, op: Any) -> Key | None:
        if not isinstance(op, OpOverload) or not self.relevant(op):
            return None
        self.counts[op] += 1
        return op, self.counts[op] - 1


class _Keep(_Counting):
    """In forward: keeps results that are wanted."""

    def __init__(self, kept: dict[Key, Any], relevant: Callable[[Any], bool], wanted: Callable[..., bool]):
        super().__init__(kept, relevant)
        self.wanted = wanted

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        key = self.key(op)
        if key is not None and self.wanted(key, args, kwargs or {}):
            self.kept[key] = tree_map_only(Tensor, _with_version, out)
        return out


class _Give(_Counting):
    """In backward: gives kept results in place of computing them."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = self.key(op)
        if key is None or key not in self.kept:
            return op(*args, **(kwargs or {}))
        return tree_map_only(_Version, functools.partial(_unchanged, op), self.kept[key])


class _Version:
    def __init__(self, tensor: Tensor):
        self.tensor, self.number = tensor, version_of(tensor)


def _with_version(tensor: Tensor) -> _Version:
    # Detached, or the graph would hold what holds the graph; but counting with it what is written in place.
    return _Version(detached_with_version(tensor))


def _unchanged(op: Any, value: _Version) -> Tensor:
    if version_of(value.tensor) != value.number:
        raise UserError(
            f"training.activation_checkpointing: the model writes in place over a result of {name_of(op)} that was to "
            "be kept; set full or none"
        )
    return value.tensor.detach()

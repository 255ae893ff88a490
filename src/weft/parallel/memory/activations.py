"""Activation checkpointing of blocks (Chen et al., "Training deep nets with sublinear memory cost", 2016).

Most memory of a step is used by tensors that are saved for backward. A checkpointed block saves only its inputs and the
results of some operations. Backward runs the block's forward again, and uses the saved results instead of computing
them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from weft.errors import UserError
from weft.parallel.memory.budget import ATTENTION, Key, choose_results, is_random, op_name
from weft.parallel.memory.host_values import is_computing, remembering
from weft.parallel.torch_private import wait_for_received
from weft.torch_private import (
    OpOverload,
    TorchDispatchMode,
    detached_with_version,
    set_activation_budget,
    storage_of,
    tree_leaves,
    tree_map_only,
    version_of,
)

_EXPENSIVE = ATTENTION | {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm", "aten::_scaled_mm",
    "aten::_scaled_grouped_mm", "aten::convolution", "weft::grouped_linear", "weft::product",
    "_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_reduce", "_c10d_functional::all_to_all_single", "_c10d_functional::broadcast",
}  # fmt: skip
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::_scaled_mm", "weft::product"}  # backward needs their inputs only
# Operations that copy values or change their shape. Backward needs no input of them.
_PASSED_ON = {
    "aten::view", "aten::_unsafe_view", "aten::t", "aten::transpose", "aten::split", "aten::cat", "aten::clone",
    "aten::detach", "aten::alias", "_c10d_functional::wait_tensor", "prim::device",
}  # fmt: skip


def checkpointed(
    forward: Callable, mode: str, number: int, of: int, *, compile: bool, tp_group: str | None = None
) -> Callable:
    """Wraps a block's forward with activation checkpointing. Recomputation draws the same random numbers.

    Args:
        forward: the block's forward, differentiable in its positional arguments and in parameters. Other values that
            `forward` reads must not change before backward. If `forward` is not compiled, `LocalParameters.wrap` must
            have wrapped it already.
        mode: value of `training.activation_checkpointing`.
        number: index of the block in the model, from 0 to `of` - 1.
        of: number of blocks of the model.
        compile: whether the returned function will be compiled.
        tp_group: name of the process group of `tp`, if there is one. Its all-gathers are of a layer's input, of which
            mode `selective` keeps this rank's shard.

    Raises:
        UserError: if `mode` is `every-N` and the model has fewer than N blocks.
    """
    kind, _, amount = mode.partition("-")
    if compile:
        set_activation_budget(float(amount) if kind == "budget" else 1.0, _is_random_node, __file__)
    if kind == "every":
        if int(amount) > of:
            raise UserError(
                f"training.activation_checkpointing: {mode} recomputes no layer, because the model has only {of} "
                "layers; use a smaller number, or set none"
            )
        kind = "none" if (number + 1) % int(amount) else "full"
    if kind == "none" or (kind == "budget" and compile):  # the compiler chooses what to save
        return forward
    if kind == "full":
        # The compiler does not trace contexts of its own. It breaks its graph where the host reads numbers anyway.
        contexts = {} if compile else {"context_fn": remembering}
        return functools.partial(checkpoint, forward, use_reentrant=False, **contexts)
    if kind == "budget":
        return _Budget(forward, float(amount))
    contexts = functools.partial(_selective, tp_group)
    return functools.partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def _is_random_node(node: torch.fx.Node) -> bool:
    """Whether a node draws random numbers, so that the compiler must save the result instead of recomputing it."""
    return is_random(node.target, node.args, node.kwargs)


def _is_expensive(tp_group: str | None, op: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether mode `selective` saves the result of an operation, because the operation is expensive to recompute.

    The result of attention is saved too, unlike in Korthikanti et al. (2022), who recompute attention.
    """
    name = op_name(op)
    if name == "_c10d_functional::all_gather_into_tensor" and tp_group in arguments:
        return False
    if name in ("aten::bmm", "aten::baddbmm"):
        # Attention scores are products that are larger than their factors, and are not saved.
        left, right = [x for x in arguments if isinstance(x, Tensor)][-2:]
        return left.shape[1] * right.shape[2] <= left[0].numel() + right[0].numel()
    return name in _EXPENSIVE and not is_random(op, arguments, named)


def _policy(tp_group: str | None, context: Any, op: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    save = _is_expensive(tp_group, op, arguments, named)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(tp_group: str | None) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    if get_proxy_mode() is not None:  # traced by a compiler
        return create_selective_checkpoint_contexts(functools.partial(_policy, tp_group))
    return _contexts(lambda op: op_name(op) in _EXPENSIVE, lambda key, *given: _is_expensive(tp_group, key[0], *given))


class _Budget:
    """A block's forward in mode `budget-X`: saves at most the fraction X of the bytes saved without checkpointing.

    The first call chooses which results are saved, for all steps and shapes. Ranks can choose different results.
    """

    def __init__(self, forward: Callable, share: float):
        self.forward, self.share = forward, share
        self.chosen: frozenset[Key] | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.chosen is None and torch.is_grad_enabled():
            self.chosen = choose_results(self.forward, arguments, named, self.share)
        return checkpoint(self.forward, *arguments, use_reentrant=False, context_fn=self._contexts, **named)

    def _contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        chosen = self.chosen or frozenset()
        ops = {op for op, _ in chosen}
        return _contexts(ops.__contains__, lambda key, *given: key in chosen and not is_random(key[0], *given))


# ---- These contexts replace PyTorch's contexts, which count every operation, even those of FSDP2's hooks, which differ
# in backward. PyTorch's contexts also return a saved result only once, but schedules that split backward need it twice.


def _contexts(
    relevant: Callable[[Any], bool], wanted: Callable[..., bool]
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Returns two context managers: one saves results in the forward pass, one reuses them in recomputation.

    Args:
        relevant: operator -> whether some results of this operator can be saved.
        wanted: (`Key` of an operator call, arguments, keyword arguments) -> whether to save the result of this call.
    """
    saved: dict[Key, Any] = {}
    forward, again = remembering()
    return _SaveResults(forward, saved, relevant, wanted), _ReuseResults(again, saved, relevant)


class _Counting(TorchDispatchMode):
    """Context manager that numbers the calls of each operator, from 0 whenever the context is entered.

    Args:
        inner: context that is entered and left with this one.
        saved: `Key` of an operator call -> saved result.
        relevant: operator -> whether its calls are numbered.
    """

    def __init__(self, inner: AbstractContextManager, saved: dict[Key, Any], relevant: Callable[[Any], bool]):
        super().__init__()
        self.inner = inner
        self.saved, self.relevant = saved, relevant
        self.counts: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # for kernels that are compiled separately, such as flex attention

    def __enter__(self):
        self.counts.clear()
        self.inner.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.inner.__exit__(*error)

    def key(self, op: Any) -> Key | None:
        if not isinstance(op, OpOverload) or not self.relevant(op) or is_computing():
            return None
        self.counts[op] += 1
        return op, self.counts[op] - 1


class _SaveResults(_Counting):
    """Context manager for the forward pass: saves the operator results that the activation checkpointing mode keeps.

    A product that is only communicated, such as a partial sum over `tp`, is not saved if the result of the collective
    is saved, because nothing in backward reads the product.
    """

    def __init__(
        self,
        inner: AbstractContextManager,
        saved: dict[Key, Any],
        relevant: Callable[[Any], bool],
        wanted: Callable[..., bool],
    ):
        super().__init__(inner, saved, relevant)
        self.wanted = wanted
        self.products: dict[int, Key] = {}  # storage -> the product that it has or copies, if no operation read it
        self.communicated: set[Key] = set()  # products that a collective with a saved result sent

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        key = self.key(op)
        if key is not None and not self.wanted(key, args, kwargs or {}):
            key = None
        self._follow(op, (args, kwargs), out, saves=key is not None)
        if key is not None:
            self.saved[key] = tree_map_only(Tensor, _Saved, out)
            if op_name(op) in _PRODUCTS:
                self.products[storage_of(out)] = key
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # Others stay saved: compiled code, and kernels outside of the dispatcher, read tensors without operations.
        for key in self.communicated.intersection(self.products.values()):
            self.saved[key] = tree_map_only(_Saved, lambda saved: _Unread(saved.tensor), self.saved[key])

    def _follow(self, op: Any, arguments: Any, out: Any, *, saves: bool) -> None:
        """Removes the products that an operation reads, except to copy them or for a collective with a saved result."""
        read, made = map(_storages, (arguments, out))
        for storage in made - read:
            self.products.pop(storage, None)  # that of a copy, which is freed and used again
        found = {self.products[storage] for storage in read if storage in self.products}
        if not found:
            return
        if saves and op_name(op).startswith("_c10d_functional::"):
            self.communicated |= found
        elif len(found) == 1 and op_name(op) in _PASSED_ON:
            (key,) = found
            self.products |= dict.fromkeys(made, key)
        else:
            self.products = {storage: key for storage, key in self.products.items() if key not in found}


def _storages(values: Any) -> set[int]:
    """Returns the storages of nested tensors, without those of sparse ones, which no product or collective has."""
    return {storage_of(x) for x in tree_leaves(values) if isinstance(x, Tensor) and x.layout == torch.strided}


class _ReuseResults(_Counting):
    """Context manager for recomputation in backward: returns saved operator results instead of computing them again."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = self.key(op)
        if key is None or key not in self.saved:
            return op(*args, **(kwargs or {}))
        wait_for_received((args, kwargs))  # as the operation would: PyTorch keeps a result until something waits for it
        return tree_map_only((_Saved, _Unread), lambda saved: saved.unchanged(op), self.saved[key])


class _Unread:
    """Stands for a product that is not saved, because recomputation only passes it to a collective with a saved result.

    NaN, so that no wrong use of it is silent.
    """

    def __init__(self, tensor: Tensor):
        self.like = tensor.new_full((), torch.nan), tensor.shape

    def unchanged(self, op: Any) -> Tensor:
        return self.like[0].expand(self.like[1])


class _Saved:
    """A saved tensor, with its version to detect later in-place writes."""

    def __init__(self, tensor: Tensor):
        # Detached, to avoid a reference cycle with the graph, but with the version of the original.
        self.tensor = detached_with_version(tensor)
        self.version = version_of(self.tensor)

    def unchanged(self, op: Any) -> Tensor:
        if version_of(self.tensor) != self.version:
            raise UserError(
                f"training.activation_checkpointing: the model writes in place over a result of {op_name(op)} that "
                "is saved for backward; set activation_checkpointing: full or none"
            )
        return self.tensor.detach()

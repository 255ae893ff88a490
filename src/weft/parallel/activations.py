"""Activation checkpointing (Chen et al., "Training deep nets with sublinear memory cost", 2016), block by block.

What operations leave for backward is most of a step's memory. A checkpointed block keeps its input and, of some
operations, the results; backward runs its forward again, taking those in place of computing them.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from weft.config.errors import UserError

_aten = torch.ops.aten
_MATMULS = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm", "aten::_scaled_mm",
    "aten::_scaled_grouped_mm", "aten::convolution", "weft::grouped_linear",
}  # fmt: skip
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable", "weft::document_attention", "flex_attention",
    "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward",
}  # fmt: skip
_COMMUNICATION = "_c10d_functional::"
# In the time in which a byte is moved a GPU computes 150 to 300 operations in 16 bits, a CPU 20 to 30.
_OPERATIONS_PER_BYTE = 100
_KNAPSACK = 1024  # parts that a budget is counted in


def checkpointed(forward: Callable, mode: str, number: int, of: int, *, compile: bool) -> Callable:
    """A block's forward, that keeps for backward what the mode says. Random numbers are drawn again as they were.

    Args:
        forward: differentiable in its positional arguments and in parameters. Whatever it finds in other places, it
            must find there in backward too.
        mode: `training.activation_checkpointing`.
        number: the block's, of the model's blocks from 0 to `of` - 1.
        compile: the result will be compiled, as a whole.

    Raises:
        UserError: not so many blocks.
    """
    kind, _, amount = mode.partition("-")
    if compile:
        _tell_compiler(float(amount) if kind == "budget" else 1.0)
    if kind == "every":
        if int(amount) > of:
            raise UserError(
                f"training.activation_checkpointing: {mode}, and the model has {of} blocks, so none would be "
                "recomputed; lower it, or set none"
            )
        kind = "none" if (number + 1) % int(amount) else "full"
    if kind == "none" or (kind == "budget" and compile):  # the compiler chooses by itself what to keep
        return forward
    if kind == "full":
        return functools.partial(checkpoint, forward, use_reentrant=False)
    if kind == "budget":
        return _Budget(forward, float(amount))
    contexts = functools.partial(create_selective_checkpoint_contexts, _keep_expensive)
    return functools.partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def _tell_compiler(share: float) -> None:
    """What share to keep; it holds for all that this process compiles from now on."""
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class KeepRandom(CustomGraphPass):
        """Has the compiler keep what is random: to meet a budget it would draw anew (PyTorch 2.13), numbers
        that forward did not have."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.nodes:
                if node.op == "call_function" and _draws(node.target, node.args, node.kwargs):
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

        def uuid(self) -> bytes:
            return get_hash_for_files((__file__,))

    torch._functorch.config.activation_memory_budget = share
    torch._inductor.config.joint_custom_post_pass = KeepRandom() if share < 1 else None
    # It warns of operations in place inside of what is computed again; ours are none whose result backward needs.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


# ---- by operation


def _keep_expensive(context: Any, op: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    """Keep results of matrix products, attention and communication (Korthikanti et al., 2022, with more kept)."""
    name = _name(op)
    if name in ("aten::bmm", "aten::baddbmm"):
        # Attention's scores, where no kernel hides them, have more numbers than what they are the products of.
        factors = [x for x in arguments if isinstance(x, Tensor)][-2:]
        keep = factors[0].shape[1] * factors[1].shape[2] <= factors[0][0].numel() + factors[1][0].numel()
    elif name in _MATMULS:
        keep = True
    elif name in _ATTENTION:
        keep = not _draws(op, arguments, named)
    else:
        keep = _communicates(op)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _name(op: Any) -> str:
    return op._schema.name if isinstance(op, OpOverload) else op.name()


def _communicates(op: Any) -> bool:
    name = _name(op)
    return name.startswith(_COMMUNICATION) and not name.endswith("::wait_tensor") and not op._schema.is_mutable


def _draws(op: Any, arguments: Sequence[Any], named: dict[str, Any]) -> bool:
    """Whether it draws random numbers. If it is not run again, those after it would draw its numbers."""
    if not isinstance(op, OpOverload):
        return False
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            given = arguments[place] if place < len(arguments) else named.get("dropout_p", argument.default_value)
            return bool(given)
    return torch.Tag.nondeterministic_seeded in op.tags


# ---- by a budget, without a compiler


class _Budget:
    """A forward of which about a share of the saved activations is kept, by the operations whose results these are.

    The first forward is run once more, before, to see what each operation costs and leaves. What is kept is then the
    same in all steps, whatever their shapes. Ranks may choose differently, so all collectives are run again.
    """

    def __init__(self, forward: Callable, share: float):
        self.forward, self.share = forward, share
        self.kept: Collection[tuple[Any, int]] | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.kept is None and torch.is_grad_enabled():
            results, saved, given = measure(self.forward, arguments, named)
            self.kept = most_valuable(results, int(self.share * saved) - given)
        return checkpoint(self.forward, *arguments, use_reentrant=False, context_fn=self._contexts, **named)

    def _contexts(self) -> Any:
        counts: dict[bool, Counter] = {False: Counter(), True: Counter()}  # in forward, in backward
        kept = self.kept or ()

        def keep(context: Any, op: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
            count = counts[context.is_recompute]
            count[op] += 1
            known = (op, count[op] - 1) in kept and not _draws(op, arguments, named)
            return CheckpointPolicy.MUST_SAVE if known else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(keep)


class Result(NamedTuple):
    """What an operation leaves: `key` is itself and how many of its kind went before."""

    key: tuple[Any, int]
    bytes: int
    cost: float  # of computing it, in operations


def most_valuable(results: Sequence[Result], capacity: int) -> frozenset[tuple[Any, int]]:
    """The results of at most `capacity` bytes that cost most to compute: the 0-1 knapsack, in 1,024 parts."""
    if capacity <= 0 or not results:
        return frozenset()
    part = math.ceil(capacity / _KNAPSACK)
    best = np.zeros(capacity // part + 1)  # the cost that fits into so many parts
    taken = np.zeros((len(results), len(best)), bool)
    for number, result in enumerate(results):
        size = math.ceil(result.bytes / part)
        if size < len(best):
            with_it = best[: len(best) - size] + result.cost
            taken[number, size:] = with_it > best[size:]
            best[size:] = np.maximum(best[size:], with_it)
    left, chosen = len(best) - 1, []
    for number in reversed(range(len(results))):
        if taken[number, left]:
            chosen.append(results[number].key)
            left -= math.ceil(results[number].bytes / part)
    return frozenset(chosen)


def measure(forward: Callable, arguments: Sequence[Any], named: dict[str, Any]) -> tuple[list[Result], int, int]:
    """Run a forward and leave no trace: random numbers and tensors that it writes to are put back.

    Returns:
        The results that may be kept; the bytes that are saved for backward without any checkpointing, and how many of
        them are the forward's arguments. Parameters and what is not the block's own are not among them.
    """
    recorder = _Recorder()
    given = {id(x.untyped_storage()): x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad}
    device = next((x.device for x in given.values()), torch.device("cpu"))
    devices = [] if device.type == "cpu" else [device]
    try:
        with (
            torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"),
            torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor),
            recorder,
        ):
            out = forward(*arguments, **named)
    finally:
        recorder.put_back()
    del out
    inputs = {_storage(x): x.untyped_storage().nbytes() for x in given.values()}
    return recorder.results(), recorder.saved_bytes() + sum(inputs.values()), sum(inputs.values())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass
class _Operation:
    key: tuple[Any, int]
    cost: float
    made: dict[int, int]  # storage -> bytes
    may_be_kept: bool


class _Recorder(TorchDispatchMode):
    """Sees each operation of a forward, what it makes, and what of that autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter = Counter()
        self.operations: list[_Operation] = []
        self.maker: dict[int, _Operation] = {}  # of each storage; a freed one's place may be taken by another
        self.saved: dict[int, int] = {}
        self.last_needed = 0  # operations after this many need not be run again
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # tensors from outside that are written to, as they were

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # attention by a compiled kernel is no operation of ours

    def pack(self, tensor: Tensor) -> Tensor:
        if _storage(tensor) in self.maker:
            self.saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
            self.last_needed = len(self.operations)
        return tensor.detach()  # itself, it would hold the graph that holds it

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(op, OpOverload):
            return op(*args, **kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for tensor in self._written(op, args, kwargs):
            if _storage(tensor) in self.maker:
                self.maker[_storage(tensor)].may_be_kept = False
            else:
                self.before.setdefault(_storage(tensor), (tensor, tensor.clone()))
        out = op(*args, **kwargs)
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        known = {_storage(x) for x in inputs}
        made = {_storage(x): x.untyped_storage().nbytes() for x in outputs if _storage(x) not in known}
        keep = bool(made) and not op._schema.is_mutable and not _draws(op, args, kwargs)
        keep = keep and not _name(op).startswith(_COMMUNICATION)
        key = (op, self.count[op])
        self.count[op] += 1
        operation = _Operation(key, _cost(op, args, kwargs, out, inputs, outputs), made, keep)
        self.operations.append(operation)
        self.maker.update(dict.fromkeys(made, operation))
        return out

    @staticmethod
    def _written(op: OpOverload, args: Any, kwargs: Any) -> list[Tensor]:
        if not op._schema.is_mutable:
            return []
        found = []
        for place, argument in enumerate(op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found += tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name))
        return [x for x in found if isinstance(x, Tensor)]

    def put_back(self) -> None:
        with torch.no_grad():
            for tensor, before in self.before.values():
                tensor.copy_(before)

    def results(self) -> list[Result]:
        needed = (one for one in self.operations[: self.last_needed] if one.may_be_kept and one.cost)
        return [Result(one.key, sum(one.made.values()), one.cost) for one in needed]

    def saved_bytes(self) -> int:
        return sum(self.saved.values())


def _cost(op: OpOverload, args: Any, kwargs: Any, out: Any, inputs: list[Tensor], outputs: list[Tensor]) -> float:
    """Operations, and bytes as so many as are computed in the time of moving one."""
    name = _name(op)
    if name.startswith(("aten::empty", "aten::new_empty")):
        return 0.0
    moved = sum(x.numel() * x.element_size() for x in (*inputs, *outputs))
    if name == "weft::grouped_linear":
        computed = 2 * outputs[0].numel() * inputs[0].shape[-1]
    elif name in _ATTENTION:
        q, k, v = inputs[:3]  # `[batch, heads, seq, head_dim]`, flash-attn's `[..., seq, heads, head_dim]`
        keys = k.shape[-3 if name.startswith("flash_attn") else -2]
        computed = 2 * q.shape[:-1].numel() * keys * (q.shape[-1] + v.shape[-1])
    elif op.overloadpacket in flop_registry:
        computed = flop_registry[op.overloadpacket](*args, **kwargs, out_val=out)
    else:
        computed = 0
    return float(computed + _OPERATIONS_PER_BYTE * moved)

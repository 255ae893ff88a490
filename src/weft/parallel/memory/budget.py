"""Which results of a block's operations to keep for backward, if there is room for a part of what it needs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from weft.torch_private import OpOverload, TorchDispatchMode, schema_of, storage_of, tree_leaves

Key = tuple[Any, int]  # an operation, and how many of its kind went before

ATTENTION = {
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable", "weft::document_attention", "flex_attention",
    "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward",
}  # fmt: skip
# Never kept. What is communicated: ranks that choose differently would wait for one another. Copies: FSDP2's hooks
# make some too, others in backward, and operations are found again by counting.
_COMMUNICATION = ("_c10d_functional::", "c10d::")
_COPIES = {"aten::_to_copy", "aten::clone", "aten::cat", "aten::copy", "aten::split_with_sizes_copy"}
# While a byte is moved, a GPU computes 150 to 300 operations in 16 bits, a CPU 20 to 30.
_OPERATIONS_PER_BYTE = 100
_PARTS = 1024  # that a budget is counted in


def name_of(op: Any) -> str:
    """`aten::mm` of `torch.ops.aten.mm.default`."""
    return schema_of(op).name if isinstance(op, OpOverload) else op.name()


def draws(op: Any, arguments: Sequence[Any], named: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers. If it is not run again, those after it would draw its numbers."""
    if not isinstance(op, OpOverload):
        return False
    for place, argument in enumerate(schema_of(op).arguments):
        if argument.name == "dropout_p":
            return bool(arguments[place] if place < len(arguments) else named.get("dropout_p", argument.default_value))
    return torch.Tag.nondeterministic_seeded in op.tags


def choose(forward: Callable, arguments: Sequence[Any], named: dict[str, Any], share: float) -> frozenset[Key]:
    """The results that save most computing, in a share of the bytes that are saved without any checkpointing.

    The block's input is among those bytes. The forward is run once, and leaves no trace: random numbers and tensors
    that it writes to are put back.
    """
    own = [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad]
    device = next((x.device for x in own), torch.device("cpu"))
    recorder = _Recorder()
    try:
        with (
            torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type),
            torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor),
            recorder,
        ):
            forward(*arguments, **named)
    finally:
        recorder.put_back()
    given = sum({storage_of(x): x.untyped_storage().nbytes() for x in own}.values())
    saved = given + sum(recorder.saved.values())
    return most_valuable(recorder.results(), int(share * saved) - given)


class Result(NamedTuple):
    """What an operation leaves."""

    key: Key
    bytes: int
    cost: float  # of computing it, in operations


def most_valuable(results: Sequence[Result], capacity: int) -> frozenset[Key]:
    """The results of at most `capacity` bytes that cost most to compute: the 0-1 knapsack, in 1,024 parts."""
    if capacity <= 0:
        return frozenset()
    part = math.ceil(capacity / _PARTS)
    best = np.zeros(capacity // part + 1)  # the cost that fits into so many parts
    taken = np.zeros((len(results), len(best)), bool)
    sizes = [math.ceil(result.bytes / part) for result in results]
    for number, (result, size) in enumerate(zip(results, sizes, strict=True)):
        if size < len(best):
            with_it = best[: len(best) - size] + result.cost
            taken[number, size:] = with_it > best[size:]
            best[size:] = np.maximum(best[size:], with_it)
    left, chosen = len(best) - 1, []
    for number in reversed(range(len(results))):
        if taken[number, left]:
            chosen.append(results[number].key)
            left -= sizes[number]
    return frozenset(chosen)


@dataclass
class _Operation:
    key: Key
    cost: float
    made: dict[int, int]  # storage -> bytes
    may_be_kept: bool


class _Recorder(TorchDispatchMode):
    """Sees each operation of a forward, what it makes, and what of that autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[Any] = Counter()
        self.operations: list[_Operation] = []
        self.maker: dict[int, _Operation] = {}  # of each storage; the place of a freed one may be taken by another
        self.saved: dict[int, int] = {}
        self.needed = 0  # of so many operations; backward runs no more of them again
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # tensors from outside that are written to, as they were

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def pack(self, tensor: Tensor) -> Tensor:
        """For autograd's hook. Parameters and what other blocks have too are not made here, and do not count."""
        if storage_of(tensor) in self.maker:
            self.saved[storage_of(tensor)] = tensor.untyped_storage().nbytes()
            self.needed = len(self.operations)
        return tensor.detach()  # itself, it would hold the graph that holds it

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(op, OpOverload):
            return op(*args, **kwargs)
        for tensor in _written(op, args, kwargs):
            if storage_of(tensor) in self.maker:
                self.maker[storage_of(tensor)].may_be_kept = False
            else:
                self.before.setdefault(storage_of(tensor), (tensor, tensor.clone()))
        out = op(*args, **kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        known = {storage_of(x) for x in inputs}
        made = {storage_of(x): x.untyped_storage().nbytes() for x in outputs if storage_of(x) not in known}
        keep = bool(made) and not schema_of(op).is_mutable and not draws(op, args, kwargs)
        keep = keep and name_of(op) not in _COPIES and not name_of(op).startswith(_COMMUNICATION)
        operation = _Operation((op, self.count[op]), _cost(op, args, kwargs, out, inputs, outputs), made, keep)
        self.count[op] += 1
        self.operations.append(operation)
        self.maker.update(dict.fromkeys(made, operation))
        return out

    def put_back(self) -> None:
        """Undo what was written."""
        with torch.no_grad():
            for tensor, before in self.before.values():
                tensor.copy_(before)

    def results(self) -> list[Result]:
        """Those that may be kept."""
        needed = (one for one in self.operations[: self.needed] if one.may_be_kept and one.cost)
        return [Result(one.key, sum(one.made.values()), one.cost) for one in needed]


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _written(op: OpOverload, args: Any, kwargs: Any) -> list[Tensor]:
    if not schema_of(op).is_mutable:
        return []
    found = []
    for place, argument in enumerate(schema_of(op).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return _tensors(found)


def _cost(op: OpOverload, args: Any, kwargs: Any, out: Any, inputs: list[Tensor], outputs: list[Tensor]) -> float:
    """Operations; of bytes, as many as are computed in the time of moving them."""
    name = name_of(op)
    if name.startswith(("aten::empty", "aten::new_empty")):
        return 0.0
    if name == "weft::grouped_linear":
        computed = 2 * outputs[0].numel() * inputs[0].shape[-1]
    elif name in ATTENTION:
        q, k, v = inputs[:3]  # `[batch, heads, seq, head_dim]`, flash-attn's `[..., seq, heads, head_dim]`
        keys = k.shape[-3 if name.startswith("flash_attn") else -2]
        computed = 2 * q.shape[:-1].numel() * keys * (q.shape[-1] + v.shape[-1])
    elif op.overloadpacket in flop_registry:
        computed = flop_registry[op.overloadpacket](*args, **kwargs, out_val=out)
    else:
        computed = 0
    moved = sum(x.numel() * x.element_size() for x in (*inputs, *outputs))
    return float(computed + _OPERATIONS_PER_BYTE * moved)

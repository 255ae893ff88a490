"""Chooses which results of a block's operations to save for backward within a memory budget."""

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

from weft.parallel.memory.host_values import is_computing
from weft.torch_private import OpOverload, TorchDispatchMode, schema_of, storage_of, tree_leaves

Key = tuple[Any, int]  # an operator, and the number of earlier calls of the operator in this forward

ATTENTION = {
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable", "weft::document_attention", "weft::blocked_attention",
    "flex_attention",
    "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward",
}  # fmt: skip
# Results of these operations are never saved. Collectives: ranks that save different results would deadlock. Copies:
# calls are identified by counting, and FSDP2's hooks copy too, with different counts in forward and backward.
_COLLECTIVES = ("_c10d_functional::", "c10d::")
_COPIES = {"aten::_to_copy", "aten::clone", "aten::cat", "aten::copy", "aten::split_with_sizes_copy"}
# Per byte of memory bandwidth, a GPU computes 150 to 300 operations in 16 bits, a CPU 20 to 30.
_OPERATIONS_PER_BYTE = 100
_UNITS = 1024  # number of units of the capacity in the knapsack problem


def op_name(op: Any) -> str:
    """Returns the name of an operator without its overload, such as `aten::mm`."""
    return schema_of(op).name if isinstance(op, OpOverload) else op.name()


def is_random(op: Any, arguments: Sequence[Any], named: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers.

    Recomputation must repeat such operations, so that later operations draw the same numbers as in the forward pass.

    Args:
        arguments, named: positional and keyword arguments of the operation.
    """
    if not isinstance(op, OpOverload):
        return False
    for place, argument in enumerate(schema_of(op).arguments):
        if argument.name == "dropout_p":
            return bool(arguments[place] if place < len(arguments) else named.get("dropout_p", argument.default_value))
    return torch.Tag.nondeterministic_seeded in op.tags


def choose_results(forward: Callable, arguments: Sequence[Any], named: dict[str, Any], share: float) -> frozenset[Key]:
    """Returns the keys of the operator results to save, which avoid the most recomputation within a memory budget.

    Runs `forward` once. Afterwards restores the random state, and the tensors that `forward` wrote in place.

    Args:
        share: the budget, as a fraction of the bytes that are saved without checkpointing. The budget and these bytes
            include the block's inputs.
    """
    inputs = [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad]
    device = next((x.device for x in inputs), torch.device("cpu"))
    recorder = _Recorder()
    try:
        with (
            torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type),
            torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor),
            recorder,
        ):
            forward(*arguments, **named)
    finally:
        recorder.restore()
    input_bytes = sum({storage_of(x): x.untyped_storage().nbytes() for x in inputs}.values())
    total = input_bytes + sum(recorder.saved.values())
    return most_valuable(recorder.results(), int(share * total) - input_bytes)


class Result(NamedTuple):
    """The result of one call of an operator: its key, its size in bytes, and the cost of its recomputation."""

    key: Key
    bytes: int
    cost: float  # cost of recomputation, in arithmetic operations


def most_valuable(results: Sequence[Result], capacity: int) -> frozenset[Key]:
    """Returns the keys of the results with the highest total cost and at most `capacity` bytes in total.

    Solves the 0-1 knapsack problem, with sizes rounded up to 1/1,024 of the capacity.
    """
    if capacity <= 0:
        return frozenset()
    unit = math.ceil(capacity / _UNITS)
    best = np.zeros(capacity // unit + 1)  # highest cost by capacity in units
    taken = np.zeros((len(results), len(best)), bool)
    sizes = [math.ceil(result.bytes / unit) for result in results]
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
    outputs: dict[int, int]  # storage -> bytes
    may_be_saved: bool


class _Recorder(TorchDispatchMode):
    """Records the operations of a forward pass, the outputs of these operations, and which outputs autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[Any] = Counter()
        self.operations: list[_Operation] = []
        self.producer: dict[int, _Operation] = {}  # by storage; later operations can reuse a freed storage
        self.saved: dict[int, int] = {}
        self.needed = 0  # recomputation stops after this many operations
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # storage -> (outer tensor, copy)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def pack(self, tensor: Tensor) -> Tensor:
        """Records a tensor that autograd saves, unless it comes from outside of the block (such as a parameter)."""
        if tensor.layout == torch.strided and storage_of(tensor) in self.producer:
            self.saved[storage_of(tensor)] = tensor.untyped_storage().nbytes()
            self.needed = len(self.operations)
        return tensor.detach()  # the tensor itself would be a reference cycle with the graph

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(op, OpOverload) or is_computing():  # calls that recomputation does not repeat do not count
            return op(*args, **kwargs)
        for tensor in _written(op, args, kwargs):
            if storage_of(tensor) in self.producer:
                self.producer[storage_of(tensor)].may_be_saved = False
            else:
                self.before.setdefault(storage_of(tensor), (tensor, tensor.clone()))
        out = op(*args, **kwargs)
        inputs, outputs = ([x for x in _tensors(y) if x.layout == torch.strided] for y in ((args, kwargs), out))
        known = {storage_of(x) for x in inputs}
        new = {storage_of(x): x.untyped_storage().nbytes() for x in outputs if storage_of(x) not in known}
        save = bool(new) and not schema_of(op).is_mutable and not is_random(op, args, kwargs)
        save = save and op_name(op) not in _COPIES and not op_name(op).startswith(_COLLECTIVES)
        operation = _Operation((op, self.count[op]), _cost(op, args, kwargs, out, inputs, outputs), new, save)
        self.count[op] += 1
        self.operations.append(operation)
        self.producer.update(dict.fromkeys(new, operation))
        return out

    def restore(self) -> None:
        """Restores the values of tensors that come from outside of the block and that the forward pass overwrote."""
        with torch.no_grad():
            for tensor, before in self.before.values():
                tensor.copy_(before)

    def results(self) -> list[Result]:
        """Returns the results that can be saved for backward.

        Recomputation stops when it has computed the last tensor that autograd saves. So the results of later operations
        are omitted.
        """
        needed = (x for x in self.operations[: self.needed] if x.may_be_saved and x.cost)
        return [Result(x.key, sum(x.outputs.values()), x.cost) for x in needed]


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
    """Returns the cost of an operation: its FLOPs, plus `_OPERATIONS_PER_BYTE` per byte of its inputs and outputs."""
    name = op_name(op)
    if name.startswith(("aten::empty", "aten::new_empty")):
        return 0.0
    if name in ("weft::grouped_linear", "weft::product"):
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

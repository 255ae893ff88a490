"""What ranks send one another: every collective of this process, as PyTorch hands it to a backend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

MARK = "mark"
# Operator -> what it is, and the argument that this rank gives (of a receive: takes).
_C10D = {
    "_allgather_base_": ("all_gather", "input_tensor"),
    "allgather_": ("all_gather", "input_tensors"),
    "allgather_coalesced_": ("all_gather", "input_list"),
    "allgather_into_tensor_coalesced_": ("all_gather", "inputs"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "alltoall_base_": ("all_to_all", "input"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "gather_": ("gather", "input_tensors"),
    "scatter_": ("scatter", "output_tensors"),
    "send": ("send", "tensors"),
    "recv_": ("receive", "tensors"),
    "barrier": ("barrier", None),
}
_FUNCTIONAL = {
    "all_gather_into_tensor": ("all_gather", "input"),
    "all_gather_into_tensor_out": ("all_gather", "input"),
    "all_gather_into_tensor_coalesced": ("all_gather", "inputs"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "all_reduce": ("all_reduce", "input"),
    "all_reduce_": ("all_reduce", "input"),
    "all_reduce_coalesced": ("all_reduce", "inputs"),
    "all_reduce_coalesced_": ("all_reduce", "inputs"),
    "all_to_all_single": ("all_to_all", "input"),
    "broadcast": ("broadcast", "input"),
    "broadcast_": ("broadcast", "input"),
}
OPERATORS = {"c10d": _C10D, "_c10d_functional": _FUNCTIONAL}
SILENT = {"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"}


class Call(NamedTuple):
    """A collective, or a mark between two.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce, all_to_all, send, receive, ...
        axis: of the mesh; of a mark its name.
        phase: what the caller of `Wire` said last; "backward" inside of autograd's engine.
        bytes: of the whole: of a gather what each rank has in the end, else what this rank gives (a receive: takes).
        sent: of these, what this rank cannot but send, whatever the algorithm.
    """

    kind: str
    axis: str
    phase: str
    bytes: int = 0
    sent: int = 0


class Wire(TorchDispatchMode):
    """Notes each collective while it is entered. What compiled code does inside is not seen.

    Args:
        axes: name of a process group -> what to call it (`axis_names`); others go by their own names.
    """

    def __init__(self, axes: Mapping[str, str] | None = None):
        super().__init__()
        self.axes, self.calls, self.phase = dict(axes or {}), list[Call](), ""

    def mark(self, name: str) -> None:
        """Note that something happened between two collectives."""
        self.calls.append(Call(MARK, name, self._phase()))

    def totals(self, *fields: str) -> dict[tuple, tuple[int, int]]:
        """(phase, kind, axis) -> number of calls and their bytes.

        Args:
            fields: by which of `Call`'s the calls are told apart.
        """
        found: dict[tuple, tuple[int, int]] = {}
        for call in self.calls:
            if call.kind != MARK:
                key = tuple(getattr(call, field) for field in fields or ("phase", "kind", "axis"))
                number, size = found.get(key, (0, 0))
                found[key] = number + 1, size + call.bytes
        return found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is taken apart first; its collectives come here afterwards
        if func.namespace in OPERATORS and func._opname not in SILENT:
            names = (argument.name for argument in func._schema.arguments)
            self._note(OPERATORS[func.namespace], func._opname, dict(zip(names, args, strict=False)) | (kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _note(self, operators: dict, name: str, given: dict[str, Any]) -> None:
        if name not in operators:
            raise NotImplementedError(f"{name}: a collective that is not known here")
        kind, argument = operators[name]
        group = _group(given)
        size = sum(t.numel() * t.element_size() for t in _tensors(given[argument])) if argument else 0
        ranks, whole = group.size(), size
        sent = size * (ranks - 1) // ranks
        if kind == "all_gather":
            whole, sent = size * ranks, size * (ranks - 1)
        elif kind == "all_reduce":
            sent *= 2
        elif kind == "receive":
            sent = 0
        elif kind == "all_to_all" and (splits := given.get("input_split_sizes")):
            sent = size - size * splits[group.rank()] // max(sum(splits), 1)
        elif kind not in ("all_to_all", "reduce_scatter"):
            sent = size
        self.calls.append(Call(kind, self.axes.get(group.group_name, group.group_name), self._phase(), whole, sent))

    def _phase(self) -> str:
        return self.phase if torch._C._current_graph_task_id() == -1 else "backward"


def axis_names(*meshes: DeviceMesh | None) -> dict[str, str]:
    """Names of process groups -> the axes of meshes that they are of."""
    return {
        mesh.get_group(axis).group_name: axis for mesh in meshes if mesh is not None for axis in mesh.mesh_dim_names
    }


def _group(given: dict[str, Any]) -> dist.ProcessGroup:
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        return _resolve_process_group(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, Iterable):
        for one in given:
            yield from _tensors(one)

"""Tensors without memory, whose bytes are counted, and the private names of torch that they need.

`weft.torch_private` has the others.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor

from weft.torch_private import TorchDispatchMode, backward_number, tree_leaves

# The private names; `weft.torch_private.NAMES` gives each of its own a reason.
NAMES = {
    "torch._subclasses.fake_tensor:FakeTensor": "tensors without memory, whose values a step asks for",
    "torch._subclasses.fake_tensor:FakeTensorMode": "see FakeTensor",
    "torch.distributed.tensor._sharding_prop:detect_fake_mode": "DTensor infers shapes in a mode of its own, whose "
    "tensors must not be counted",
    "torch.ops:aten._local_scalar_dense": "answers when a step reads a value of a tensor without values",
    "torch._C:_storage_Use_Count": "whether autograd adds to a gradient in place, as it does without a mode",
    "torch:Tensor._use_count": "the same",
}


class _Mode(TorchDispatchMode):
    """A mode that answers at once when C++ asks for the device of a tensor without values.

    That is two thirds of what modes are called for, and needs no other mode.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].device
        return self.dispatch(func, types, args, kwargs or {})

    def dispatch(self, func, types, args, kwargs):
        """As `__torch_dispatch__`, for everything else."""
        return func(*args, **kwargs)


class Received(_Mode):
    """Fills received tensors with 1: the fake process group leaves them as they were."""

    def dispatch(self, func, types, args, kwargs):
        if func is torch.ops.c10d.recv_.default:
            for tensor in args[0]:
                tensor.fill_(1)
        return func(*args, **kwargs)


class _Answers(_Mode):
    """Answers when a single value is read: floats are 1, int32 (a pipeline's vote on shapes) is 1, else 0."""

    def dispatch(self, func, types, args, kwargs):
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else int(args[0].dtype == torch.int32)
        return func(*args, **kwargs)


@contextmanager
def without_values(rows: int, choices: int) -> Iterator[FakeTensorMode]:
    """Yields a mode whose tensors have no values.

    Args:
        rows: number of rows that a rank sends to experts, in equal numbers to the ranks of `ep`.
        choices: number of pairs of a row and an expert that computes it.
    """

    def tolist(tensor: torch.Tensor) -> Any:
        if tensor.dim() == 3:  # how many rows and choices `send_to_ranks` sends to each rank, and receives
            return [[[rows // len(ranks), choices // len(ranks)] for _ in ranks] for ranks in tensor]
        return tensor.item() if tensor.dim() == 0 else [1.0 if tensor.is_floating_point() else 0] * len(tensor)

    with (
        mock.patch.object(FakeTensor, "tolist", tolist),
        mock.patch("torch.chunk", _chunk),
        mock.patch("torch.cat", _cat),
        # DTensor infers shapes with full tensors of a mode. It must be a mode of its own, or they would be counted.
        mock.patch("torch.distributed.tensor._sharding_prop.detect_fake_mode", return_value=None),
    ):
        yield FakeTensorMode(allow_non_fake_inputs=True)


class _Chunks(list):
    """The chunks of a tensor along `dim`, which `_cat` concatenates without making them. The list is empty."""

    def __init__(self, tensor: torch.Tensor, number: int, dim: int):
        self.tensor, self.number, self.dim = tensor, number, dim


def _chunk(tensor: torch.Tensor, number: int, dim: int = 0) -> Any:
    """`torch.chunk`, except that FSDP2 gets `_Chunks`, which it only concatenates.

    FSDP2 makes a chunk for each rank of a parameter that is not sharded along dimension 0. With thousands of ranks,
    the chunks' shapes take most of the time of a step without values.
    """
    module = sys._getframe(1).f_globals["__name__"]
    if module.endswith("._fsdp_collectives") and isinstance(tensor, FakeTensor) and tensor.shape[dim] % number == 0:
        return _Chunks(tensor, number, dim)
    return _torch_chunk(tensor, number, dim)


def _cat(tensors: Any, dim: int = 0, *, out: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(tensors, _Chunks):
        return _torch_cat(tensors, dim) if out is None else _torch_cat(tensors, dim, out=out)
    chunks = tensors.tensor.unflatten(tensors.dim, (tensors.number, -1)).movedim(tensors.dim, dim)
    if out is None:
        return chunks.reshape(*chunks.shape[:dim], -1, *chunks.shape[dim + 2 :])
    out.unflatten(dim, (tensors.number, -1)).copy_(chunks)
    return out


_torch_chunk, _torch_cat = torch.chunk, torch.cat


@contextmanager
def answering(mode: FakeTensorMode) -> Iterator[None]:
    """Runs code within a mode of `without_values`."""
    with mode, _Answers():
        yield


class MemoryCounter(_Mode):
    """Counts the bytes of a mode's tensors while they live.

    Attributes:
        now: bytes by part (see `_part`).
        peak: these bytes when their sum was largest; `reset` forgets earlier peaks.
    """

    def __init__(self, mode: FakeTensorMode, parameters: Iterable[torch.Tensor]):
        super().__init__()
        self.mode = mode
        self.now, self.peak, self.total, self.most = Counter[str](), Counter[str](), 0, 0
        self.sizes = weakref.WeakKeyDictionary[torch.UntypedStorage, _Size]()
        for tensor in parameters:
            self._note(tensor.untyped_storage(), "parameters")

    def reset(self, optimizer: Iterable[torch.Tensor]) -> None:
        """Forgets earlier peaks, and counts tensors as the optimizer's state."""
        for tensor in optimizer:
            if (size := self.sizes.get(tensor.untyped_storage())) is not None:
                self._freed(size)
                size.part = "optimizer"
                self._grow(size, size.bytes)
        self.most, self.peak = self.total, self.now.copy()

    def __enter__(self):
        resize, note = torch.UntypedStorage.resize_, self._note

        def resized(storage, size):  # FSDP2 frees gathered parameters in this way
            resize(storage, size)
            note(storage, "gathered")

        self.patch = mock.patch.object(torch.UntypedStorage, "resize_", resized)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.stop()
        return super().__exit__(*error)

    def dispatch(self, func, types, args, kwargs):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        func = torch.ops.aten.add_.Tensor if _is_sum_in_place(func, args) else func
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode:
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage, part: str = "") -> None:
        size = self.sizes.get(storage)
        if size is None:
            size = self.sizes[storage] = _Size(part or _part())
            weakref.finalize(storage, self._freed, size)
        if more := storage.nbytes() - size.bytes:
            self._grow(size, more)
            size.bytes += more

    def _grow(self, size: _Size, more: int) -> None:
        self.now[size.part] += more
        self.total += more
        if self.total > self.most:
            self.most, self.peak = self.total, self.now.copy()

    def _freed(self, size: _Size) -> None:
        self.now[size.part] -= size.bytes
        self.total -= size.bytes


@dataclass
class _Size:
    part: str
    bytes: int = 0


def _is_sum_in_place(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation is autograd's sum of two gradients of one tensor, which outside of a mode adds to the first.

    Within a mode autograd always makes a new tensor (`can_accumulate_inplace` in PyTorch's input_buffer.cpp). Outside
    of it, too, if the first is also the gradient of another tensor, or shares its memory.
    """
    if func is not torch.ops.aten.add.Tensor or backward_number() is None:
        return False
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(_DISPATCHING):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "_engine_run_backward":
        return False
    first, second = args[:2]
    if (first.shape, first.dtype) != (second.shape, second.dtype) or first._use_count() > second._use_count():
        return False
    # Two references: the tensor's, and that of the storage's Python object. Others are those of tensors that share it.
    return torch._C._storage_Use_Count(first.untyped_storage()._cdata) == 2


# Files of the frames between autograd's engine and a mode. Not DTensor's: autograd adds to no subclass in place.
_DISPATCHING = ("/planner/torch_private.py", "/torch/_ops.py", "/torch/_compile.py", "/torch/_dynamo/eval_frame.py")


def _part() -> str:
    """Returns the part that a new tensor counts for, by the innermost known code that creates it.

    Results of a forward pass, also of a repeated one, are `activations`. What else backward creates are `gradients`.
    Avoids a frame's `f_locals`: reading it keeps alive the tensors that the function deletes.
    """
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        part = _PARTS.get(code)
        if part is None:
            part = _PARTS[code] = _part_of(code.co_filename, code.co_name)
        if part == "reduction":  # first its input is created, then the shard of the gradients
            return "gradients" if "reduce_scatter_input" in frame.f_locals else "buffers"
        if part:
            return part
        frame = frame.f_back
    return "gradients" if backward_number() is not None else "activations"


_PARTS: dict[CodeType, str] = {}


def _part_of(file: str, function: str) -> str:
    """Returns the part of tensors that a function and those that it calls create; "" if the callers tell."""
    if "/fsdp/" in file:
        names = {"foreach_reduce": "reduction", "foreach_all_gather": "gathered", "init_all_gather_outputs": "gathered"}
        return names.get(function, "")
    if file.endswith("/torch/utils/checkpoint.py"):
        return "activations" if function == "recompute_fn" else ""
    loss = "gradients" if function in ("_weight_gradient", "_rounded_gradient") else "logits"
    parts = {"/kernels/cross_entropy.py": loss, "/gradients/clip.py": "buffers"}
    parts |= {"/optim/muon.py": "buffers", "/optim/optimizer.py": "buffers"}
    return next((part for name, part in parts.items() if file.endswith(name)), "")

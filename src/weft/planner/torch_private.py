"""Tensors without memory, whose bytes are counted, and the private names of torch that they need.

`weft.torch_private` has the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor

from weft.torch_private import TorchDispatchMode, tree_leaves

# The private names; `weft.torch_private.NAMES` gives each of its own a reason.
NAMES = {
    "torch._subclasses.fake_tensor:FakeTensor": "tensors without memory, whose values a step asks for",
    "torch._subclasses.fake_tensor:FakeTensorMode": "see FakeTensor",
    "torch.distributed.tensor._sharding_prop:detect_fake_mode": "DTensor infers shapes in a mode of its own, whose "
    "tensors must not be counted",
    "torch.ops:aten._local_scalar_dense": "answers when a step reads a value of a tensor without values",
}


class Received(TorchDispatchMode):
    """Fills received tensors with 1: the fake process group leaves them as they were."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.recv_.default:
            for tensor in args[0]:
                tensor.fill_(1)
        return func(*args, **(kwargs or {}))


class _Answers(TorchDispatchMode):
    """Answers when a single value is read: floats are 1, int32 (a pipeline's vote on shapes) is 1, else 0."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else int(args[0].dtype == torch.int32)
        return func(*args, **(kwargs or {}))


@contextmanager
def without_values(rows: int) -> Iterator[FakeTensorMode]:
    """Yields a mode whose tensors have no values; `rows`: rows that a rank sends to experts, balanced over `ep`."""

    def tolist(tensor: torch.Tensor) -> Any:
        if tensor.dim() == 0:
            return tensor.item()
        if tensor.dim() == 2:
            return [tolist(row) for row in tensor]
        return [1.0 if tensor.is_floating_point() else rows // len(tensor)] * len(tensor)

    with (
        mock.patch.object(FakeTensor, "tolist", tolist),
        # DTensor infers shapes with full tensors of a mode. It must be a mode of its own, or they would be counted.
        mock.patch("torch.distributed.tensor._sharding_prop.detect_fake_mode", return_value=None),
    ):
        yield FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def answering(mode: FakeTensorMode) -> Iterator[None]:
    """Runs code within a mode of `without_values`."""
    with mode, _Answers():
        yield


class MemoryCounter(TorchDispatchMode):
    """Counts the bytes of a mode's tensors while they live: `now`, and `peak`, which may be reset to `now`."""

    def __init__(self, mode: FakeTensorMode, tensors: Iterable[torch.Tensor]):
        super().__init__()
        self.mode, self.now, self.peak = mode, 0, 0
        self.sizes = weakref.WeakKeyDictionary[torch.UntypedStorage, _Number]()
        for tensor in tensors:
            self._note(tensor.untyped_storage())

    def __enter__(self):
        resize, note = torch.UntypedStorage.resize_, self._note

        def resized(storage, size):  # FSDP2 frees gathered parameters in this way
            resize(storage, size)
            note(storage)

        self.patch = mock.patch.object(torch.UntypedStorage, "resize_", resized)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode:
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage not in self.sizes:
            weakref.finalize(storage, self._freed, number := _Number())
            self.sizes[storage] = number
        self.now += storage.nbytes() - self.sizes[storage].bytes
        self.sizes[storage].bytes = storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _freed(self, number: _Number) -> None:
        self.now -= number.bytes


class _Number:
    bytes = 0

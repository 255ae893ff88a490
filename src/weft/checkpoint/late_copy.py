"""Defines `LateCopies`, which copies tensors beside the training, before they change."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

import numpy as np
import torch

from weft.checkpoint.torch_private import versions

_BLOCK = 16 * 2**20  # bytes in a block, of one tensor or of several
_SMALL = 64 * 2**10  # bytes of a tensor that is copied at once, in less time than a thread needs to take a block

Pair = tuple[np.ndarray, np.ndarray]  # the bytes of a copy, and of its tensor


class LateCopies:
    """Copies of CPU tensors, made block by block by every thread that calls `finish`.

    Any thread can begin. The thread that changes the tensors calls `finish` before it does so, and copies the blocks
    that no other thread has taken. So it never waits longer than for a copy of all tensors.

    Args:
        unchanged: name -> tensor that must not change until `finish` returns. If one does, `changed` has its name, as
            far as PyTorch notices: not if it is written to through `tensor.data`.
    """

    def __init__(self, unchanged: Mapping[str, torch.Tensor]):
        self.changed: list[str] = []
        self._versions = {name: (tensor, versions(tensor)) for name, tensor in unchanged.items()}
        self._blocks: deque[list[Pair]] = deque()
        self._last, self._room = [], 0  # the last block, and its free bytes
        self._open, self._lock, self._done = 0, threading.Lock(), threading.Event()

    def add(self, copy: torch.Tensor, source: torch.Tensor) -> None:
        """Copies a tensor later if it is a plain tensor on the CPU and not small, otherwise now."""
        plain = type(source) is torch.Tensor and source.device.type == "cpu" and source.is_contiguous()
        if not plain or source.nbytes <= _SMALL:
            copy.copy_(source, non_blocking=True)
            return
        one, two = (tensor.view(-1).view(torch.uint8).numpy() for tensor in (copy, source))
        for start in range(0, len(two), _BLOCK):
            part = slice(start, start + _BLOCK)
            if self._room < len(two[part]):
                self._last, self._room = [], _BLOCK
                self._blocks.append(self._last)
            self._last.append((one[part], two[part]))
            self._room -= len(two[part])

    def begin(self) -> None:
        """Ends the calls of `add`, before the first call of `finish`."""
        self._open = len(self._blocks)
        if not self._open:
            self._close()

    def finish(self) -> None:
        """Copies blocks until none is left, and waits for those of other threads."""
        while True:
            try:
                block = self._blocks.popleft()
            except IndexError:
                break
            for copy, source in block:
                np.copyto(copy, source)  # other threads run meanwhile
            with self._lock:
                self._open -= 1
                last = not self._open
            if last:
                self._close()
        self._done.wait()

    def _close(self) -> None:
        """Compares the versions, before any thread goes on that may change the tensors."""
        self.changed = [name for name, (tensor, before) in self._versions.items() if versions(tensor) != before]
        self._versions = {}
        self._done.set()

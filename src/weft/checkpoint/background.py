"""Defines `BackgroundSaver`, which writes checkpoints in a thread while the training goes on."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist

from weft.checkpoint.late_copy import LateCopies
from weft.checkpoint.save import StagedSave
from weft.checkpoint.tensor_file import Entry
from weft.parallel import ranks

NICENESS = 10  # of the thread, so that the training gets the cores first


class BackgroundSaver:
    """Writes one checkpoint at a time in a thread.

    The thread communicates over a process group of its own, so its collectives do not mix with those of the training.
    It spends its time in copying, hashing and writing, during which Python's lock is free.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple, torch.Tensor] = {}  # of the last checkpoint
        self._held: dict[tuple, torch.Tensor] = {}  # of the checkpoint that begins
        self._sources: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # its names, tensors and buffers
        self._copies: LateCopies | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._group: dist.ProcessGroup | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint was started and `finish` was not called."""
        return self._thread is not None

    @property
    def ended(self) -> bool:
        """Whether a checkpoint was started and, on this rank, no more work is left to do for it."""
        return self._thread is not None and not self._thread.is_alive()

    def hold(self, entry: Entry) -> Entry:
        """Replaces the tensor of an entry by host memory, which is used again for the next checkpoint.

        The memory is pinned if the tensor is on a GPU. `start` copies the tensor into it.
        """
        source = entry.read()
        assert isinstance(source, torch.Tensor)
        key = entry.name, entry.offsets, source.shape, source.dtype
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        self._held[key] = buffer
        self._sources.append((entry.name, source, buffer))
        return replace(entry, read=lambda: buffer)

    def begin(self) -> Callable[[Entry], Entry]:
        """Prepares for a checkpoint, after `finish`. Returns `hold`. Every rank must call it."""
        assert self._thread is None
        if self._group is None and ranks.distributed():
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        self._held, self._sources = {}, []
        return self.hold

    def start(self, staged: StagedSave, *, late: bool = False) -> None:
        """Copies the tensors of a checkpoint, whose entries `hold` has replaced, and starts to write it.

        Every rank must call it.

        Args:
            late: whether the thread copies `staged.updated`, if these tensors are on the CPU. They must not change
                before `copied` returns.
        """
        updated = staged.updated if late else {}
        self._copies = copies = LateCopies(updated)
        for name, source, buffer in self._sources:
            if name in updated:
                copies.add(buffer, source)
            else:
                buffer.copy_(source, non_blocking=True)
        copies.begin()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._buffers, self._sources = self._held, []  # frees the buffers of tensors that are gone
        self._thread = threading.Thread(target=self._write, args=(staged, copies), name="checkpoint", daemon=True)
        self._thread.start()

    def copied(self) -> None:
        """Waits until all tensors of the checkpoint in progress are copied, and helps to copy them."""
        if self._copies is not None:
            self._copies.finish()
            self._copies = None

    def _write(self, staged: StagedSave, copies: LateCopies) -> None:
        def copy() -> None:
            copies.finish()
            if copies.changed:
                raise RuntimeError(f"{staged.target.name}: {copies.changed[0]} changed while it was copied")

        try:
            ranks.agree(copy, group=self._group)
            if sys.platform == "linux":  # where a thread has a priority of its own
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            staged.write(self._group, workers=1, reports=False)
        except Exception as error:  # `finish` raises it
            self._error = error

    def finish(self, seconds: float | None = None) -> None:
        """Waits for the checkpoint in progress, if there is one. Every rank must call it.

        Args:
            seconds: maximum time to wait, for a process that exits after a failure. Default: no limit.

        Raises:
            UserError: the checkpoint could not be written, on all ranks.
        """
        if self._thread is None:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            return
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

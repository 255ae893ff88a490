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

from weft.checkpoint.save import StagedSave
from weft.checkpoint.tensor_file import Entry
from weft.parallel import ranks

NICENESS = 10  # of the thread, so that the training gets the cores first


class BackgroundSaver:
    """Writes one checkpoint at a time in a thread.

    The thread communicates over a process group of its own, so its collectives do not mix with those of the training.
    It spends its time in hashing and writing, during which Python's lock is free.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple, torch.Tensor] = {}  # of the last checkpoint
        self._held: dict[tuple, torch.Tensor] = {}  # of the checkpoint that begins
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
        """Copies the tensor of an entry into host memory, which is used again for the next checkpoint.

        The memory is pinned if the tensor is on a GPU. `start` waits until the copies are complete.
        """
        source = entry.read()
        assert isinstance(source, torch.Tensor)
        key = entry.name, entry.offsets, source.shape, source.dtype
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        buffer.copy_(source, non_blocking=True)
        self._held[key] = buffer
        return replace(entry, read=lambda: buffer)

    def begin(self) -> Callable[[Entry], Entry]:
        """Prepares for a checkpoint, after `finish`. Returns `hold`. Every rank must call it."""
        assert self._thread is None
        if self._group is None and ranks.distributed():
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        self._held = {}
        return self.hold

    def start(self, staged: StagedSave) -> None:
        """Starts to write a checkpoint, whose entries `hold` copied. Every rank must call it."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._buffers = self._held  # frees the buffers of tensors that are gone
        self._thread = threading.Thread(target=self._write, args=(staged,), name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, staged: StagedSave) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
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

"""Defines `Ahead`, which reads the next batch while the device computes the current step."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from weft.data.batches.batch import Batch
from weft.errors import UserError
from weft.train.rollouts.source import RolloutSource

if TYPE_CHECKING:
    from weft.train.loop import Loop


class Ahead:
    """An iterator over batches, which can read one batch in advance.

    Args:
        batches: the batches, of which None stands for a request to stop. None: there are no batches to read, because a
            program passes them to `Trainer.step`.
        device: the device of the training. For a GPU, batches are put into page-locked memory, from which copies run
            beside the host.
        early: whether a batch can be read before the update of the step before: not if the model generates it.
    """

    def __init__(self, batches: Generator[Batch | None] | None, device: torch.device, *, early: bool = True):
        self._batches, self._pins = batches, device.type == "cuda"
        # On a CPU, nothing computes beside the host.
        self._early = batches is not None and early and device.type != "cpu"
        self._found: list[Batch | UserError | None] = []

    def fetch(self) -> None:
        """Reads the next batch, if that can be done in advance. An error is raised when the batch is requested."""
        if not self._early or self._found:
            return
        try:
            self._found.append(self._read())
        except StopIteration:
            self._early = False
        except UserError as error:
            self._found.append(error)

    def __next__(self) -> Batch | None:
        """Returns the next batch.

        Raises:
            UserError: the batch cannot be read.
        """
        found = self._found.pop() if self._found else self._read()
        if isinstance(found, UserError):
            raise found
        return found

    def close(self) -> None:
        """Closes the source of the batches, and drops a batch that was read in advance."""
        self._found, self._early = [], False
        if self._batches is not None:
            self._batches.close()

    def _read(self) -> Batch | None:
        batch = next(self._batches) if self._batches is not None else None
        if batch is None or not self._pins or batch.tokens.is_pinned():  # workers pin their batches
            return batch
        return batch.pin_memory()


def batches_ahead(loop: Loop, step: int) -> Ahead:
    """Returns `loop.batches(step)`, of which each is read while the device computes the step before."""
    early = not isinstance(loop.data.source, RolloutSource)
    loop.ahead = Ahead(loop.batches(step), loop.world.device, early=early)
    return loop.ahead


@contextmanager
def closed_at_end(loop: Loop) -> Iterator[None]:
    """Context of a run. At its end, the workers that read batches end, and no longer hold the run's lock."""
    try:
        yield
    finally:
        loop.ahead.close()

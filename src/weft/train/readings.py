"""Defines `Readings`: the loss, the gradient norm and other numbers of steps, copied to the host once per step or less.

Until the host waits for a number, the device computes beside it. With `training.sync_every` above 1, the host starts
the next step before the numbers of the last one exist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.parallel.objective import quotients
from weft.train.watch.guard import Finding

if TYPE_CHECKING:
    from weft.train.loop import Loop


class Numbers(NamedTuple):
    """What the host reads of a step.

    Attributes:
        loss: the mean loss of the global batch.
        norm: the gradient norm before clipping.
        scalars: the objective's scalars.
        balance: the result of `ExpertBalance.measure`.
    """

    loss: float
    norm: float
    scalars: dict[str, float]
    balance: list[float]


NOT_READ = Numbers(float("nan"), math.nan, {}, [])  # a NaN of its own, by whose identity an unread loss is known


@dataclass
class Reading:
    """The numbers of one step, on the device.

    Args:
        step: number of updates before the step.
        weight: total weight of the global batch.
        names: names of the objective's scalars.
        totals: sums of the loss and of the scalars over the global batch (`Totals.vector`).
        norm: the result of `gradient_norm`.
        balance: the result of `ExpertBalance.measure`.
    """

    step: int
    weight: float
    names: Sequence[str]
    totals: torch.Tensor
    norm: torch.Tensor
    balance: torch.Tensor
    _host: torch.Tensor = field(init=False)
    _copied: torch.cuda.Event | None = field(init=False, default=None)

    def start_copy(self, *, beside: bool) -> None:
        """Copies the numbers to the host.

        Args:
            beside: whether the host goes on beside the copy; otherwise `numbers` makes it.
        """
        self._host = torch.cat((self.totals, self.norm.reshape(1).to(self.totals.device), self.balance))
        if beside and self._host.device.type == "cuda":
            pinned = torch.empty(self._host.shape, dtype=self._host.dtype, pin_memory=True)
            self._host = pinned.copy_(self._host, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def numbers(self) -> Numbers:
        """Returns the numbers. Waits for the device, but for nothing that started after `start_copy`."""
        if self._copied is not None:
            self._copied.synchronize()
        loss, *values = self._host.tolist()
        scalars, rest = values[: 2 * len(self.names)], values[2 * len(self.names) :]
        return Numbers(loss / (self.weight or 1.0), rest[0], quotients(self.names, scalars), rest[1:])


class Readings:
    """The steps whose numbers the host has not read.

    Args:
        every: value of `training.sync_every`.
    """

    def __init__(self, every: int):
        self.every, self._unread = every, []

    def add(self, reading: Reading, *, due: bool) -> list[tuple[Reading, Numbers]]:
        """Adds a step, and returns the numbers of the steps that are read now, oldest first.

        Args:
            due: whether something that follows this step (such as a line of metrics, or a checkpoint) needs its
                numbers. If not, every `every`-th step reads the numbers of the steps before it.
        """
        reading.start_copy(beside=self.every > 1 and not due)
        self._unread.append(reading)
        if self.every == 1 or due:
            return self.read()
        return self.read(keep=1) if (reading.step + 1) % self.every == 0 else []

    def read(self, keep: int = 0) -> list[tuple[Reading, Numbers]]:
        """Returns the numbers of the steps that are not read, except for the newest `keep` steps."""
        count = len(self._unread) - keep
        found, self._unread = self._unread[:count], self._unread[count:]
        return [(reading, reading.numbers()) for reading in found]


def needs_numbers(loop: Loop, step: int) -> bool:
    """Whether a line of metrics, a validation, samples or a checkpoint follow the update to `step`."""
    length = loop.length
    intervals = [loop.config.log.every, length.checkpoint_every]
    intervals += [length.validation_every] if loop.data.validates else []
    intervals += [length.samples_every] if loop.sampler is not None and loop.sampler.tokenizer is not None else []
    return loop.saver.may_save(step) or any(loop.due(step, every) for every in intervals)


def judge(loop: Loop, read: list[tuple[Reading, Numbers]]) -> tuple[list[Finding], bool]:
    """Judges the steps whose numbers were read, and keeps the newest numbers in `loop.numbers`.

    Returns:
        The findings of the watch, and whether the numbers of the newest step are finite.
    """
    found, finite = [], True
    for reading, numbers in read:
        loop.numbers, (loss, norm) = numbers, numbers[:2]
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite or not loop.scale.may_skip():  # otherwise an overflow of float16
            found.append(loop.guard.judge(loss, norm, loop.state.step - reading.step))
    return [finding for finding in found if finding is not None], finite


def report(loop: Loop, found: list[Finding]) -> Finding | None:
    """Reports findings, and returns the first one that ends the step."""
    for finding in found:
        step = loop.state.step - finding.late
        loop.recorder.found(finding, step, loop.guard.data_step(step))
        if finding.ends_step:
            return finding
    return None

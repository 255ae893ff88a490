"""Defines the recorder of `weft profile`: ranges in the trace, step times, and the categories of tensors."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, record_function

from weft.formatting import amount, counted
from weft.observe.memory import MARK
from weft.observe.trace import DATA, STEP
from weft.train.data import Data
from weft.train.job import Job
from weft.train.recorder import Recorder
from weft.train.watch.guard import Finding

Tensors = Iterable[tuple[torch.Tensor, str]]  # each tensor with its memory category


@dataclass(frozen=True)
class Request:
    """The settings of a profile.

    Attributes:
        out: the path of the output folder.
        steps: number of recorded steps.
        warmup: number of steps before the recorded steps.
        ranks: the ranks that record; None for all ranks.
    """

    out: Path
    steps: int = 3
    warmup: int = 5
    ranks: tuple[int, ...] | None = None


class ProfilingRecorder(Recorder):
    """The recorder of profiled steps. It does not print the usual output of a run.

    Attributes:
        records: whether this rank records a trace.
        seconds: the duration of each step, measured as in `weft train`.
        marks: index of a mark in the trace -> {address of a tensor storage: memory category} at the time of the mark.
        before: address, size in bytes and category of each tensor storage that existed before the trace began.
        profiler: PyTorch's profiler; None before `start`, and on ranks that do not record.
    """

    def __init__(self, job: Job, data: Data, model: nn.Module, step: int, frozen: Any = None, *, request: Request):
        self.request, self.records = request, request.ranks is None or job.world.rank in request.ranks
        self.seconds: list[float] = []
        self.marks: dict[int, dict[int, str]] = {}
        self.before: list[tuple[int, int, str]] = []
        self.profiler: Any = None
        length = dataclasses.replace(data.length, steps=request.warmup + request.steps)
        super().__init__(job, dataclasses.replace(data, length=length), model, step, frozen)

    def _introduce(self, parameters: int, trained: int, step: int, plan: Any) -> None:
        self.parameters = parameters

    def start(self, tensors: Callable[[], Tensors]) -> None:
        """Prints what is profiled. If this rank records, starts the profiler, which skips the warm-up steps.

        Args:
            tensors: function that returns the gradients and all tensors that outlive a step, with their categories.
        """
        self.tensors, request, device = tensors, self.request, self.world.device.type
        if self.prints:
            self.console.line(
                f"profiling {self.config.run.name}: {amount(self.parameters)} parameters, {request.warmup} warm-up and "
                f"{counted(request.steps, 'recorded step')} of {counted(self.length.tokens_per_step or 0, 'token')}, "
                f"{self.config.training.dtype} on {self.world.ranks} x {device}"
            )
        if not self.records:
            return
        ready = min(request.warmup, 1)  # the first step of the profiler is slower, too
        self.profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])],
            schedule=torch.profiler.schedule(wait=request.warmup - ready, warmup=ready, active=request.steps, repeat=1),
            record_shapes=True,
            profile_memory=True,
        )
        self.profiler.start()

    def mark(self, *_: Any) -> None:
        """Adds a mark to the trace and records the categories of the current tensors, if this step is recorded."""
        if self.records and len(self.seconds) >= self.request.warmup:
            number = len(self.marks)
            with record_function(f"{MARK}{number}"):
                self.marks[number] = {address: category for address, _, category in self._storages()}

    def begin_step(self) -> None:
        if self.records and len(self.seconds) == self.request.warmup:
            gc.collect()
            self.before = list(self._storages())
        self.mark()
        self.range = record_function(f"{STEP}{len(self.seconds) + 1}").__enter__()
        self.waiting = record_function(DATA).__enter__()
        super().begin_step()

    def data_arrived(self) -> None:
        super().data_arrived()
        self.waiting.__exit__(None, None, None)

    def end_step(self, step: int, size: int, sequence: int, *, logged: bool, **measured: float) -> dict[str, Any]:
        line = super().end_step(step, size, sequence, logged=True, **measured)
        self.range.__exit__(None, None, None)
        self.mark()
        self.seconds.append(self.clock.step_seconds)
        if self.profiler is not None:
            self.profiler.step()
        return line

    def found(self, finding: Finding, step: int, data_step: int) -> None:
        """Warns of a finding of the watch. A profile has no events, and ends if a run would stop or roll back."""
        self.console.warning(f"step {step + 1}: {finding.text}; lower optimizer.lr or --steps")

    def ended(self, status: str, step: int, reason: str | None = None) -> None:
        """Prints that no profile was written, if the steps ended early."""
        if status != "finished":
            self.console.line("the steps ended early, and no profile was written")

    def _storages(self) -> Iterator[tuple[int, int, str]]:
        """Yields address, size in bytes and memory category of each tensor storage on this device.

        The tensors are those that the function passed to `start` yields.
        """
        seen: set[int] = set()
        for tensor, category in self.tensors():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.device.type != self.world.device.type:
                continue  # offloaded
            storage = local.detach().untyped_storage()
            if storage.data_ptr() not in seen and storage.nbytes():
                seen.add(storage.data_ptr())
                yield storage.data_ptr(), storage.nbytes(), category

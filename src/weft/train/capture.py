"""What is noted while a run's steps are profiled: ranges and marks in the trace, seconds, whose memory is where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Request:
    """What is to be profiled.

    Attributes:
        out: the folder to make.
        steps, warmup: how many are recorded, after how many that are not.
        ranks: those that record; None: all.
    """

    out: Path
    steps: int = 3
    warmup: int = 5
    ranks: tuple[int, ...] | None = None


@dataclass
class Capture:
    """What one rank records.

    Attributes:
        seconds: of each step, from before its data to after its update; as `weft train` counts them.
        marks: what lay at which address, by the number of a range in the trace.
        before: address, bytes and category of what there was when recording began.
        found: what is in profile.json, on the first rank.
    """

    request: Request
    records: bool = True
    device: str = "cpu"
    seconds: list[float] = field(default_factory=list)
    marks: dict[int, dict[int, str]] = field(default_factory=dict)
    before: list[tuple[int, int, str]] = field(default_factory=list)
    found: dict[str, Any] | None = None
    profiler: Any = None

    def start(self, device: torch.device) -> None:
        """Get ready; the profiler itself records only after the warm-up."""
        self.device = device.type
        if not self.records:
            return
        ready = min(self.request.warmup, 1)  # the profiler, too, is slower in its first step
        self.profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])],
            schedule=torch.profiler.schedule(
                wait=self.request.warmup - ready, warmup=ready, active=self.request.steps, repeat=1
            ),
            record_shapes=True,
            profile_memory=True,
        )
        self.profiler.start()

    @property
    def recording(self) -> bool:
        """Whether the step that goes on is one of those to be recorded."""
        return self.records and len(self.seconds) >= self.request.warmup

    def mark(self, tensors: Iterable[tuple[torch.Tensor, str]]) -> None:
        """Note in the trace what these tensors' memory is for."""
        number = len(self.marks)
        with record_function(f"{MARK}{number}"):
            self.marks[number] = {address: category for address, _, category in storages(tensors, self.device)}


class ProfilingRecorder(Recorder):
    """Opens and closes the trace's ranges; says what is profiled, and nothing of a run that ends."""

    def __init__(self, job: Job, data: Data, model: nn.Module, step: int, *, capture: Capture):
        self.capture, self.range, self.on_edge = capture, None, None
        steps = capture.request.warmup + capture.request.steps
        length = dataclasses.replace(data.length, steps=steps)
        super().__init__(job, dataclasses.replace(data, length=length), model, step)

    def watch(self, on_edge: Callable[[bool], None]) -> None:
        """Have `on_edge` called at the beginning (True) and the end of every step that is recorded."""
        self.on_edge = on_edge

    def _introduce(self, parameters: int, step: int, plan: Any) -> None:
        self.parameters = parameters

    def introduce(self) -> None:
        """What is profiled: said when nothing speaks against it any more."""
        if not self.speaks:
            return
        request = self.capture.request
        self.console.line(
            f"profiling {self.config.run.name}: {amount(self.parameters)} parameters, {request.warmup} + "
            f"{counted(request.steps, 'step')} of {counted(self.length.tokens_per_step, 'token')}, "
            f"{self.config.training.dtype} on {self.world.ranks} x {self.world.device.type}"
        )

    def begin_step(self) -> None:
        """A step begins, with the wait for its data."""
        if self.capture.recording and self.on_edge:
            self.on_edge(True)
        self.range = record_function(f"{STEP}{len(self.capture.seconds) + 1}").__enter__()
        self.waiting = record_function(DATA).__enter__()
        super().begin_step()

    def data_arrived(self) -> None:
        """The batch is here."""
        super().data_arrived()
        self.waiting.__exit__(None, None, None)

    def end_step(self, step: int, row: int, **measured: float) -> dict[str, Any]:
        """The step ends here for the trace as for tokens/s: before anything that is not training."""
        line = super().end_step(step, row, **measured)
        if self.range is not None:
            self.range.__exit__(None, None, None)
        if self.capture.recording and self.on_edge:
            self.on_edge(False)
        self.capture.seconds.append(self.clock.step_seconds)
        if self.capture.profiler is not None:
            self.capture.profiler.step()
        return line

    def not_finite(self, step: int, loss: float, norm: float, batch: Any) -> None:
        """There is no profile of a run that breaks."""
        self.console.warning(f"step {step + 1}: not finite: the loss is {loss}, the gradient's norm {norm}")

    def ended(self, status: str, step: int, reason: str | None = None) -> None:
        """Say it if nothing came of it."""
        if status != "finished":
            self.console.line("ended early; nothing was written")


def storages(tensors: Iterable[tuple[torch.Tensor, str]], device: str) -> Iterator[tuple[int, int, str]]:
    """Address, bytes and category of each piece of this device's memory that these tensors are in, once."""
    seen: set[int] = set()
    for tensor, category in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type != device:
            continue  # offloaded
        storage = local.detach().untyped_storage()
        if storage.data_ptr() not in seen and storage.nbytes():
            seen.add(storage.data_ptr())
            yield storage.data_ptr(), storage.nbytes(), category

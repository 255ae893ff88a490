"""A few steps of a run under PyTorch's profiler: the trainer's own, in a scratch directory, nothing saved of them."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.shard_files import new_folder
from weft.config.run import RunConfig
from weft.errors import UserError
from weft.files import refuse_existing
from weft.formatting import byte_size
from weft.observe.console import Console
from weft.observe.manifest import hardware, now, versions
from weft.observe.memory import GRADIENTS, OPTIMIZER, PARAMETERS, picture, timeline
from weft.observe.profile_page import page
from weft.observe.trace import Trace, collectives, operators, read_trace, step_times
from weft.parallel.ranks import mistake
from weft.parallel.world import World
from weft.train.capture import Capture, ProfilingRecorder, Request, storages
from weft.train.loop import Loop, Outcome
from weft.train.run_directory import RunDirectory
from weft.train.stop import StopRequest
from weft.train.trainer import Trainer

KEPT_OPERATORS = 50  # kinds, of each rank


class ProfiledLoop(Loop):
    """Takes the steps that are asked for, saves and measures nothing, and writes the profile."""

    recorder: ProfilingRecorder

    def __init__(self, *parts: Any, capture: Capture, **named: Any):
        super().__init__(*parts, **named)
        self.capture = capture

    def due(self, step: int, every: int) -> bool:
        """Never: no checkpoint, no validation, no samples."""
        return False

    def save(self, step: int) -> None:
        """A signal or a loss that is no number ends the profile: there is nothing to keep."""

    def run(self, step: int, stop: StopRequest | None = None) -> Outcome:
        """Warm up, record, and leave the profile in its folder, whole; nothing of it if the steps end early."""
        capture, request, world = self.capture, self.capture.request, self.world
        stop = stop or StopRequest()
        steps = request.warmup + request.steps
        if steps > self.length.steps:
            raise mistake(
                f"--warmup {request.warmup} and --steps {request.steps} are {steps} steps, and this run has "
                f"{self.length.steps}; ask for fewer"
            )
        if request.ranks and max(request.ranks) >= world.ranks:
            raise mistake(f"--ranks: there is no rank {max(request.ranks)}; they are 0 to {world.ranks - 1}")
        capture.records = request.ranks is None or world.rank in request.ranks
        self.length = dataclasses.replace(self.length, steps=steps)
        self.recorder.watch(self.marked)
        self.optimizer.register_step_pre_hook(self.before_update)
        world.agree(lambda: raise_if_impossible(request.out), only_first=True)
        self.recorder.introduce()
        capture.start(world.device)
        outcome = super().run(step, stop)
        if outcome.status != "finished":
            return outcome
        try:
            with making(request.out, world) as folder:
                self.write(folder)
                received = next((number for number in world.gather(stop.received) if number is not None), None)
                if received is not None:
                    raise _Stopped(received)
        except _Stopped as early:
            return dataclasses.replace(outcome, status="stopped", signal=early.signal)
        return outcome

    def marked(self, begins: bool) -> None:
        """A recorded step begins or ends: note which memory is whose."""
        capture = self.capture
        if begins and not capture.before:
            gc.collect()
            capture.before = list(storages(self.tensors(), capture.device))
        capture.mark(self.tensors())

    def before_update(self, *_: Any) -> None:
        """The only moment of a step at which all gradients are there."""
        if self.capture.recording:
            self.capture.mark(self.tensors())

    def tensors(self) -> Iterator[tuple[torch.Tensor, str]]:
        """This rank's parts of what stays from step to step, and of gradients."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                yield parameter.grad, GRADIENTS
            yield parameter, PARAMETERS
        yield from ((buffer, PARAMETERS) for buffer in self.model.buffers())
        for state in self.optimizer.state.values():
            yield from ((value, OPTIMIZER) for value in state.values() if isinstance(value, torch.Tensor))

    def write(self, folder: Path) -> None:
        """Every rank its trace and picture, the first rank the numbers and the page."""
        capture, world = self.capture, self.world
        reports = world.gather(world.agree(lambda: self.rank_report(folder) if capture.records else None))
        if world.rank == 0:
            found = self.summary([report for report in reports if report is not None])
            capture.found = found
        world.agree(lambda: write_files(folder, capture.found or {}), only_first=True)

    def rank_report(self, folder: Path) -> dict[str, Any]:
        """Write this rank's trace and memory picture; give its numbers."""
        capture, device, rank = self.capture, self.world.device, self.world.rank
        capture.profiler.stop()
        trace_file, memory_file = f"trace-rank-{rank:05}.json.gz", f"memory-rank-{rank:05}.svg"
        if not folder.is_dir():
            raise UserError("not every machine sees this folder; give an --out on a disk that they share", folder)
        try:
            capture.profiler.export_chrome_trace(str(folder / trace_file))
            trace = read_trace(folder / trace_file)
            self.raise_if_empty(trace)
            place = (1, device.index or 0) if device.type == "cuda" else (0, -1)
            line = timeline(trace, place, capture.before, capture.marks)
            title = f"Memory of rank {rank} ({device}), greatest {byte_size(line.peak, 'MB')}; parts at that moment"
            (folder / memory_file).write_text(picture(line, title), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot be written: {error.strerror or error}; nothing was made", folder) from None
        return {
            "rank": rank,
            "trace": trace_file,
            "memory_picture": memory_file,
            "step_seconds": capture.seconds,
            "steps": [dataclasses.asdict(times) for times in step_times(trace)],
            "operators": [work_dict(work) for work in operators(trace)[:KEPT_OPERATORS]],
            "collectives": [work_dict(work) for work in collectives(trace)],
            "memory": {"peak_bytes": line.peak, "at_peak_bytes": line.at_peak},
        }

    def raise_if_empty(self, trace: Trace) -> None:
        """A GPU whose counters may not be read gives a trace without kernels: that is no idle GPU."""
        if self.world.device.type == "cuda" and not trace.on_device:
            raise UserError(
                "the profiler saw no work of the GPU: reading its counters may need a permission here (NVIDIA's "
                "ERR_NVGPUCTRPERM), or another profiler has them"
            )

    def summary(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """profile.json."""
        request, config, device = self.capture.request, self.config, self.world.device
        return {
            "made": now(),
            "run": config.run.name,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "ranks": self.world.ranks,
            "parallel": config.parallel.model_dump(mode="json"),
            "training": config.training.model_dump(mode="json"),
            "parameters": self.recorder.parameters,
            "tokens_per_step": self.length.tokens_per_step,
            "warmup": warmup(self.capture.seconds, request.warmup, self.length.tokens_per_step),
            "per_rank": ranks,
            "versions": versions(),
            "hardware": hardware(),
        }


class _Stopped(Exception):
    """A signal came while the profile was being written."""

    def __init__(self, signal: int):
        self.signal = int(signal)


def profile(config: RunConfig, request: Request, console: Console | None = None) -> tuple[Outcome, dict[str, Any]]:
    """Take the first steps of the run that `config` describes, record some, and make `request.out`.

    Nothing of the run's own directory is touched, or looked at but for what Weft chose when the run began.

    Returns:
        How it ended, and what is in profile.json (on the first rank, and if it "finished").

    Raises:
        UserError: whatever `Trainer.fit` raises; the folder exists or cannot be written; fewer steps than asked for.
    """
    config = RunDirectory(config.run_directory).with_choices(config)
    capture = Capture(request)
    with tempfile.TemporaryDirectory(prefix="weft-profile-") as scratch:  # each rank its own: nothing in it is shared
        trainer = Trainer(in_scratch(config, scratch), console=console)
        trainer.compared = config
        trainer.loop = partial(ProfiledLoop, capture=capture)
        trainer.recorder = partial(ProfilingRecorder, capture=capture)
        outcome = trainer.fit()
    return outcome, capture.found or {}


def in_scratch(config: RunConfig, directory: str) -> RunConfig:
    """The same training elsewhere, without validation, samples and trackers."""
    changes = {
        "run": {"directory": directory},
        "data": {"validation": None},
        "samples": {"prompts": []},
        "log": {"trackers": [], "metrics": []},
    }
    sections = {name: getattr(config, name).model_copy(update=change) for name, change in changes.items()}
    return config.model_copy(update={**sections, "callbacks": []})


def raise_if_impossible(out: Path) -> None:
    """Before the steps rather than after them. Raises UserError if `out` cannot be made."""
    refuse_existing(out, "name another --out")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise UserError("no folder can be made here; name another --out", above)


@contextmanager
def making(out: Path, world: World) -> Iterator[Path]:
    """On all ranks, the hidden folder that the first of them makes, which takes its name in the end or is deleted."""
    with ExitStack() as stack:
        yield world.agree(lambda: stack.enter_context(new_folder(out, 0)), only_first=True)
        world.agree(stack.close, only_first=True)


def warmup(seconds: list[float], steps: int, tokens: int) -> dict[str, Any]:
    """The first step against the steady ones: those before the profiler got ready, and those that it recorded.

    The steady step is the median of the warm-up's without its first (compiling, first allocations) and its last one.
    """
    steady, recorded = seconds[1 : steps - 1], statistics.median(seconds[steps:])
    usual = statistics.median(steady) if steady else None
    return {
        "first_step_seconds": seconds[0],
        "steady_step_seconds": usual,
        "steady_tokens_per_second": tokens / usual if usual else None,
        "recorded_step_seconds": recorded,
    }


def work_dict(work: Any) -> dict[str, Any]:
    """A row of a table, without what is not known of it."""
    return {name: value for name, value in dataclasses.asdict(work).items() if value is not None}


def write_files(folder: Path, found: dict[str, Any]) -> None:
    """profile.json and profile.html."""
    text = json.dumps(found, indent=2, ensure_ascii=False, default=str) + "\n"
    (folder / "profile.json").write_text(text, encoding="utf-8")
    (folder / "profile.html").write_text(page(found, folder), encoding="utf-8")

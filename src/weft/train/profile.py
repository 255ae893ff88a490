"""Profiles the first steps of a run with PyTorch's profiler. The trainer runs these steps in a scratch directory."""

from __future__ import annotations

import dataclasses
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
from weft.observe.trace import Trace, Work, collectives, operators, read_trace, step_times
from weft.parallel.ranks import all_gather_object, error_on_all_ranks
from weft.parallel.world import World
from weft.train.capture import ProfilingRecorder, Request
from weft.train.loop import Loop
from weft.train.run_directory import RunDirectory
from weft.train.saving import NoSaver
from weft.train.stop import Outcome, StopRequest
from weft.train.trainer import Trainer
from weft.train.watch.monitor import NoMonitor

KEPT_OPERATORS = 50  # number of operators that profile.json lists for each rank


class ProfiledLoop(Loop):
    """A training loop that runs only the requested steps, without checkpoints, and writes the profile."""

    recorder: ProfilingRecorder
    new_saver, new_monitor = NoSaver, NoMonitor

    def due(self, step: int, every: int) -> bool:
        """Returns False: profiled steps have no checkpoint, validation or samples."""
        return False

    def run(self, step: int, stop: StopRequest | None = None) -> Outcome:
        """Runs the warm-up steps and the recorded steps, and writes the folder of the profile.

        Nothing is written if training ends before the last requested step.
        """
        request, world, stop = self.recorder.request, self.world, stop or StopRequest()
        steps = request.warmup + request.steps
        assert self.length.steps is not None
        if steps > self.length.steps:
            raise error_on_all_ranks(
                f"--warmup {request.warmup} and --steps {request.steps} are {steps} steps, but this run has "
                f"{self.length.steps}; lower --steps or --warmup"
            )
        if request.ranks and max(request.ranks) >= world.ranks:
            raise error_on_all_ranks(
                f"--ranks: there is no rank {max(request.ranks)}; give ranks from 0 to {world.ranks - 1}"
            )
        self.length = dataclasses.replace(self.length, steps=steps)
        # Before the update is the only moment of a step at which all gradients exist.
        self.optimizer.register_step_pre_hook(self.recorder.mark)
        world.agree(lambda: raise_if_impossible(request.out), only_first=True)
        self.recorder.start(self.tensors)
        outcome = super().run(step, stop)
        if outcome.status != "finished":
            return outcome
        try:
            with making(request.out, world) as folder:
                self.write(folder)
                if received := [number for number in all_gather_object(stop.received) if number is not None]:
                    raise _Stopped(int(received[0]))
        except _Stopped as early:
            return dataclasses.replace(outcome, status="stopped", signal=early.args[0])
        return outcome

    def tensors(self) -> Iterator[tuple[torch.Tensor, str]]:
        """Yields this rank's gradients, parameters, buffers and optimizer state, with their memory categories."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                yield parameter.grad, GRADIENTS
            yield parameter, PARAMETERS
        yield from ((buffer, PARAMETERS) for buffer in self.model.buffers())
        for frozen in self.frozen.models.values():
            yield from ((tensor, PARAMETERS) for tensor in frozen.tensors())
        for state in self.optimizer.state.values():
            yield from ((value, OPTIMIZER) for value in state.values() if isinstance(value, torch.Tensor))

    def write(self, folder: Path) -> None:
        """Writes a trace and a picture of memory for each recording rank, and profile.json and profile.html."""
        world = self.world
        reports = all_gather_object(world.agree(lambda: self.rank_report(folder) if self.recorder.records else None))

        def write_files() -> None:
            found = self.summary([report for report in reports if report is not None])
            text = json.dumps(found, indent=2, ensure_ascii=False, default=str) + "\n"
            (folder / "profile.json").write_text(text, encoding="utf-8")
            (folder / "profile.html").write_text(page(found, folder), encoding="utf-8")

        world.agree(write_files, only_first=True)

    def rank_report(self, folder: Path) -> dict[str, Any]:
        """Writes this rank's trace and a picture of its memory over time. Returns this rank's entry of profile.json."""
        recorder, device, rank = self.recorder, self.world.device, self.world.rank
        recorder.profiler.stop()
        trace_file, memory_file = f"trace-rank-{rank:05}.json.gz", f"memory-rank-{rank:05}.svg"
        if not folder.is_dir():
            raise UserError(
                "this folder does not exist on every host; set --out to a folder on a disk that all hosts share", folder
            )
        try:
            recorder.profiler.export_chrome_trace(str(folder / trace_file))
            trace = read_trace(folder / trace_file)
            self.raise_if_empty(trace)
            place = (1, device.index or 0) if device.type == "cuda" else (0, -1)
            line = timeline(trace, place, recorder.before, recorder.marks)
            title = f"Memory of rank {rank} ({device}): peak {byte_size(line.peak, 'MB')}; categories at the peak"
            (folder / memory_file).write_text(picture(line, title), encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"cannot be written: {error.strerror or error}; no profile was written; choose another --out", folder
            ) from None
        return {
            "rank": rank,
            "trace": trace_file,
            "memory_picture": memory_file,
            "step_seconds": recorder.seconds,
            "steps": [dataclasses.asdict(times) for times in step_times(trace)],
            "operators": [known_fields(work) for work in operators(trace)[:KEPT_OPERATORS]],
            "collectives": [known_fields(work) for work in collectives(trace)],
            "memory": {"peak_bytes": line.peak, "at_peak_bytes": line.at_peak},
        }

    def raise_if_empty(self, trace: Trace) -> None:
        """Raises UserError if this rank has a GPU, but `trace` has no GPU work.

        This happens if the profiler cannot read the GPU's counters.
        """
        if self.world.device.type == "cuda" and not trace.on_device:
            raise UserError(
                "the profiler recorded no GPU work; get permission to read the GPU's counters (NVIDIA: "
                "ERR_NVGPUCTRPERM), or stop other profilers that use them"
            )

    def summary(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the content of profile.json.

        Args:
            ranks: result of `rank_report` of each recording rank.
        """
        recorder, config, device = self.recorder, self.config, self.world.device
        return {
            "made": now(),
            "run": config.run.name,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "ranks": self.world.ranks,
            "parallel": config.parallel.model_dump(mode="json"),
            "training": config.training.model_dump(mode="json"),
            "parameters": recorder.parameters,
            "tokens_per_step": self.length.tokens_per_step,
            "warmup": warmup(recorder.seconds, recorder.request.warmup, self.length.tokens_per_step or 0),
            "per_rank": ranks,
            "versions": versions(),
            "hardware": hardware(),
        }


class _Stopped(Exception):
    """Raised if a signal arrived while the profile was written. The unfinished profile is then deleted."""


def profile(config: RunConfig, request: Request, console: Console | None = None) -> Outcome:
    """Runs the first steps of a run and records some of them. Creates `request.out` if the outcome is "finished".

    Only the dtype is read from the run directory, and nothing is written there.

    Raises:
        UserError: the run cannot start (see `Trainer.fit`), the run has fewer steps than requested, or the output
            folder exists or cannot be written.
    """
    config = RunDirectory(config.run_directory).with_dtype(config)
    with tempfile.TemporaryDirectory(prefix="weft-profile-") as scratch:  # one for each rank
        trainer = Trainer(scratch_config(config, scratch), console=console)
        trainer.user_config, trainer.loop = config, ProfiledLoop
        trainer.recorder = partial(ProfilingRecorder, request=request)
        return trainer.fit()


def scratch_config(config: RunConfig, directory: str) -> RunConfig:
    """Returns a copy of a config that trains the same way in `directory`.

    The copy has no validation, text samples, callbacks, trackers and custom metrics.
    """
    changes = {
        "run": {"directory": directory},
        "data": {"validation": None},
        "samples": {"prompts": []},
        "log": {"trackers": [], "metrics": []},
    }
    sections = {name: getattr(config, name).model_copy(update=change) for name, change in changes.items()}
    return config.model_copy(update={**sections, "callbacks": []})


def raise_if_impossible(out: Path) -> None:
    """Raises UserError, before the first step, if `out` exists (and is not an empty folder) or cannot be created."""
    refuse_existing(out, "choose another --out")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise UserError("no folder can be created here; choose another --out", above)


@contextmanager
def making(out: Path, world: World) -> Iterator[Path]:
    """Context that makes a hidden folder on rank 0, and yields its path on all ranks.

    The folder is renamed to `out` if the block succeeds, and deleted otherwise.
    """
    with ExitStack() as stack:
        yield world.agree(lambda: stack.enter_context(new_folder(out, 0)), only_first=True)
        world.agree(stack.close, only_first=True)


def warmup(seconds: list[float], steps: int, tokens: int) -> dict[str, Any]:
    """Returns seconds of the first step, of a steady step and of a recorded step, and steady tokens per second.

    A steady step has the median time of the warm-up steps, excluding the first (compilation, allocation) and the last
    (in which the profiler starts). A recorded step has the median time of the recorded steps.

    Args:
        seconds: the duration of each step.
        steps: number of warm-up steps.
        tokens: number of tokens per step; 0 if it is not known.
    """
    steady, recorded = seconds[1 : steps - 1], statistics.median(seconds[steps:])
    usual = statistics.median(steady) if steady else None
    return {
        "first_step_seconds": seconds[0],
        "steady_step_seconds": usual,
        "steady_tokens_per_second": tokens / usual if usual and tokens else None,
        "recorded_step_seconds": recorded,
    }


def known_fields(work: Work) -> dict[str, Any]:
    """Returns the fields of `work` that are not None, by name."""
    return {name: value for name, value in dataclasses.asdict(work).items() if value is not None}

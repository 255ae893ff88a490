"""Defines `Recorder`, which writes the output of a run: console lines, metrics, samples, trackers, manifest and report.

Only the first rank prints and writes these files. Every rank writes a log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from torch import nn

from weft.checkpoint.load import checkpoints
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.config.transformers_model import TransformersModelSection
from weft.data.batches.batch import Batch
from weft.data.batches.loader import ValidationBatches
from weft.data.batches.mixture_plan import MixturePlan
from weft.formatting import amount, counted, duration, masked
from weft.models.build import frozen_matmul_parameters, matmul_parameters, parameter_size
from weft.observe.flop_count import flops_per_token
from weft.observe.flops import device_peak, memory_bytes, memory_kind, total_peak
from weft.observe.logs import log_to_file
from weft.observe.manifest import end_session, write_manifest
from weft.observe.metrics import MetricsFile, SamplesFile
from weft.observe.progress import SilentProgress
from weft.observe.report import build_report
from weft.observe.run_info import RunInfo
from weft.observe.status import LONG, doing
from weft.observe.tracking import Tracking
from weft.parallel.ranks import all_gather_object
from weft.train.auto_settings import DTYPES, keep_freed_memory
from weft.train.clock import StepClock
from weft.train.data import Data
from weft.train.example import write_example
from weft.train.job import Job
from weft.train.readings import NOT_READ
from weft.train.run_directory import reorders
from weft.train.state import State
from weft.train.watch.guard import Finding
from weft.train.watch.reports import react

log = logging.getLogger("weft.train")

VALIDATION_LINE = 20.0  # seconds between two lines of a long validation


class Closable(Protocol):
    """What a recorder closes: files, trackers and threads."""

    def close(self) -> None:
        """Closes it. Can be called twice."""


class Recorder:
    """Times the steps and records the events of a run.

    Args:
        data: the data of the run; the manifest contains the digests and the mixture plan.
        frozen_models: name -> path and digest of each frozen model of the objective, for the manifest.
        step: number of updates of earlier sessions. Recorded metrics and text samples of later steps are removed,
            because this session repeats these steps.
    """

    def __init__(
        self, job: Job, data: Data, model: nn.Module, step: int, frozen_models: Mapping[str, Any] | None = None
    ):
        self.job, self.config, self.world, self.console = job, job.config, job.world, job.console
        self.length, self.source = data.length, data.source
        config, world, path = job.config, job.world, job.run.path
        world.agree(lambda: log_to_file(path, world.rank))
        self.prints = world.rank == 0
        self.warned: set[str] = set()
        self.skips = 0  # skipped updates of this session
        self.closed_at_end: list[Closable] = []
        self.listeners: list[Callable[[dict[str, Any]], None]] = []  # called on the first rank with each event
        self.bar: SilentProgress | None = None
        tensors = dict(model.named_parameters())
        sizes = [(parameter_size(name, tensors), p.requires_grad) for name, p in tensors.items()]
        counts = sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)
        parameters, trained, frozen = map(int, world.sum_stages(*counts, frozen_matmul_parameters(model)))
        self.parameters, self.trained = parameters, trained
        matmul = matmul_parameters(model)
        flops = partial(flops_per_token, matmul, *_layers_and_width(config, model), frozen=frozen)
        peak = total_peak(all_gather_object(device_peak(world.device, DTYPES[config.training.dtype])))
        self.clock = StepClock(world.device, flops, peak.flops_per_second)
        facts = {
            "ranks": world.ranks,
            "mesh": world.shape.sizes,
            "parameters": parameters,
            "trained_parameters": trained,
            "matmul_parameters": matmul,
            "flops_per_token": flops(config.data.sequence_length or 0),
            "peak_flops_per_second": peak.flops_per_second,
            "peak_origin": peak.origin,
            "memory_kind": memory_kind(world.device),
            "data_digests": data.digests,
            **({"data_left_out": data.left_out} if data.left_out else {}),
            **({"mixture": data.plan.as_dict()} if data.plan is not None else {}),
            **({"frozen_models": frozen_models} if frozen_models else {}),
            **({"micro_batch_trials": job.micro_batch} if job.micro_batch else {}),
            **({"reduce_gradients": job.reduction} if job.reduction else {}),
            "steps": data.length.steps,
            "tokens_per_step": data.length.tokens_per_step,
            "resumed_step": step,
        }
        world.agree(lambda: self._open(step, facts), only_first=True)
        if self.prints:
            self._introduce(parameters, trained, step, data.plan)

    def _open(self, step: int, facts: dict[str, Any]) -> None:
        """Opens the files and the trackers, and adds this session to the manifest.

        Args:
            facts: values of the session for the manifest, such as mesh, number of parameters and data digests.
        """
        path, config = self.job.run.path, self.config
        self.metrics, self.written_samples = MetricsFile(path), SamplesFile(path)
        self.closed_at_end += [self.metrics, self.written_samples]
        for file in (self.metrics, self.written_samples):
            file.keep_until(step)
        info = RunInfo(path, path.name, masked(config.as_dict()), step or None)
        self.tracking = Tracking(config.log.trackers, info, self.console)
        self.closed_at_end.append(self.tracking)
        write_example(self.job)
        write_manifest(path, config.as_dict(), **facts, changes=self.job.changes)

    def close(self) -> None:
        """Closes the files and the trackers."""
        for opened in self.closed_at_end:
            opened.close()

    def lost_metrics(self, step: int, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the metrics of the resumed step from its checkpoint, if the metrics file lacks them; otherwise {}.

        A kill between the save and the end of the step loses them. Removes the step's samples, which are made again.
        Warns if earlier metrics are missing too, for example because the file was not copied. The first rank calls it.

        Args:
            saved: the state in the checkpoint.
        """
        last = self.metrics.last or 0
        found = saved.get("metrics", {}) if last < step else {}
        every = (self.job.run.saved or {}).get("log", {}).get("every", self.config.log.every)
        if last + every <= step - bool(found):
            ends = f"ends at step {last:,}" if last else "has no line"
            self.console.warning(
                f"{self.metrics.path} {ends}, but the run resumes after step {step:,}: the report lacks the metrics of "
                "the steps in between; to keep these metrics, stop the run and restore the file from a copy"
            )
        if found:
            self.written_samples.keep_until(step - 1)
        return dict(found)

    def _introduce(self, parameters: int, trained: int, step: int, plan: MixturePlan | None) -> None:
        training, length = self.config.training, self.length
        threads = training.threads if self.world.device.type == "cpu" else None
        share = f" ({amount(trained)} trained)" if trained < parameters else ""
        steps = "batches of Trainer.step" if length.steps is None else counted(length.steps, "step")
        if length.steps is not None and (tokens := length.tokens_per_step) is not None:
            steps += f" of {counted(tokens, 'token')} ({amount(length.steps * tokens)} in all)"
        self.console.line(
            f"{self.job.run.path}: {amount(parameters)} parameters{share}, {steps}, "
            f"{training.dtype} on {self.world.ranks} x {self.world.device.type}"
            + (f" ({counted(threads, 'thread')})" if threads else "")
        )
        for line in plan.lines() if plan is not None else ():
            self.console.line(line)
        if not step:
            return
        self.console.line(f"resumes after step {step:,}")
        changes = self.job.changes
        for key, (before, now) in changes.items():
            self.console.warning(f"changed since the run last trained: {key}: {before} -> {now}")
        if keys := [key for key in changes if reorders(key)]:
            self.console.warning(
                f"{', '.join(keys)} changed and {'decides' if len(keys) == 1 else 'decide'} which samples a step "
                "takes: from now on, samples can be repeated or skipped; use --fresh to start over"
            )

    @contextmanager
    def progress(self, step: int) -> Iterator[None]:
        """Context that shows the progress bar."""
        with self.console.progress(self.length.steps, "training", unit="step", start=step) as bar:
            self.bar = bar
            yield

    def ended(self, status: str, step: int, reason: str | None = None) -> None:
        """Records and prints the end of the session, and writes the report."""
        if not self.prints:
            return
        if status == "stopped-early":
            self.console.line(f"stopped early after step {step}, saved: {reason}")
        if status == "stopped":
            done = f"after step {step}, saved" if step else "before the first step"
            self.console.line(f"stopped {done}; the same command resumes from there")
        if self.skips:
            skipped = counted(self.skips, "update was", "updates were")
            self.console.line(f"{skipped} skipped: the gradients exceeded float16's range")
        times, clock = {}, self.clock
        if clock.warmup_seconds is not None:
            times["warmup_seconds"] = clock.warmup_seconds
            if clock.steady_steps:
                times["steady_step_seconds"] = steady = clock.steady_seconds / clock.steady_steps
                if clock.warmup_seconds > max(2 * steady, steady + 1):
                    self.console.line(
                        f"warm-up: the first step took {clock.warmup_seconds:.1f} s, later steps {steady:.3g} s "
                        f"({clock.steady_tokens / clock.steady_seconds:,.0f} tokens/s)"
                    )
        end_session(self.job.run.path, status=status, step=step, **times)
        build_report(self.job.run.path)

    def begin_step(self) -> None:
        """Starts the timer of a step, before the batch is requested."""
        self.clock.begin()

    def data_arrived(self) -> None:
        """Ends the timer of the wait for the step's batch."""
        self.clock.data_arrived()

    def end_step(self, step: int, size: int, sequence: int, *, logged: bool, **measured: float) -> dict[str, Any]:
        """Stops the timer of the step, before validation, samples and checkpoints. Then freed memory is kept.

        Args:
            step: number of updates, including this update.
            size: number of tokens in the global batch.
            sequence: number of tokens per sequence, on which the FLOPs of attention depend.
            logged: whether a line of metrics follows, whose mean times must include the update.
            measured: metrics of the update: tokens (of all steps), loss, lr, grad_norm, ...

        Returns:
            The metrics of the step so far.
        """
        self.clock.end(size, sequence, wait=logged)
        keep_freed_memory()  # from the first update on: the optimizer has its state
        line = {"step": step, **measured, **self.clock.metrics(), "memory_bytes": memory_bytes(self.world.device)}
        if self.bar is not None and self.prints:
            shown = {key: line[key] for key in ("loss", "lr", "tokens_per_second")}
            self.bar.update(step, **shown | ({"loss": None} if line["loss"] is NOT_READ.loss else {}))
        return line

    def validating(self, step: int, batches: ValidationBatches) -> Iterator[Batch]:
        """Yields the batches of a validation, and prints the progress of a long validation."""
        began, task = (printed := time.monotonic()), f"step {step:,}, validating"
        doing(task, "validation", LONG)  # the first batch may wait for workers, and for compilation
        for number, batch in enumerate(batches):
            if number and self.prints and (now := time.monotonic()) - printed > VALIDATION_LINE:
                left = duration((now - began) / number * (len(batches) - number))
                self.console.line(f"step {step:,}: validating, batch {number:,} of {len(batches):,}  ETA {left}")
                printed = now
            if number:
                doing(task, "validation")
            yield batch

    def validated(self, step: int, measured: dict[str, float]) -> None:
        """Prints the metrics of a validation."""
        if self.prints and "validation_loss" not in measured:
            reward, length = measured["validation_reward"], measured["validation_completion_length"]
            self.console.line(f"step {step:,}: validation reward {reward:.4f}, {length:.1f} tokens per completion")
        elif self.prints:
            bits = measured.get("validation_bits_per_byte")
            named = {key.partition("/")[2]: v for key, v in measured.items() if key.startswith("validation_loss/")}
            self.console.line(
                f"step {step:,}: validation loss {measured['validation_loss']:.4f}"
                + (f", {bits:.4f} bits per byte" if bits is not None else "")
                + "".join(f"; {name} {value:.4f}" for name, value in named.items())
            )

    def write(self, state: State) -> None:
        """Writes the step's metrics to the metrics file and the trackers, if the step is logged or had a validation."""
        line = state.metrics
        if not state.logged and not any(name.startswith("validation_") for name in line):
            return
        self.clock.reset()
        if not self.prints:
            return log.info("%s", line)  # the first rank's are in metrics.jsonl
        self.metrics.write(line)
        self.tracking.log(state.step, line)

    def samples(self, step: int, prompts: Sequence[str], texts: Sequence[str]) -> None:
        """Writes and prints the text that the model generated after each prompt."""
        if not self.prints:
            return
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            self.written_samples.add(step, prompt, text)
            self.console.line(f"step {step:,}: {prompt}{text}")
            self.tracking.text(step, f"sample_{number}", prompt + text)

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Context that times a save, and prints the names of removed checkpoints if the save removed more than one."""
        began, before = time.perf_counter(), checkpoints(self.job.run.path) if self.prints else []
        yield
        log.info("saved step %d in %.2f s", step, time.perf_counter() - began)
        if len(before) > 1:
            removed = sorted(set(before) - set(checkpoints(self.job.run.path)))
            if len(removed) > 1:
                names, keep = ", ".join(path.name for path in removed), self.config.checkpoint.keep_last
                self.console.line(f"step {step:,}: removed {names}, because checkpoint.keep_last is {keep}")

    def found(self, finding: Finding, step: int, data_step: int) -> None:
        """Reports a finding of the watch (see `react`)."""
        react(self, finding, step, data_step)

    def rolled_back(self, step: int) -> None:
        """Removes the metrics and samples of the steps after `step`, which the run repeats."""
        self.clock.reset()
        if self.prints:
            for file in (self.metrics, self.written_samples):
                file.keep_until(step)
            self.console.line(f"returned to the checkpoint of step {step:,}")

    def skipped(self, step: int) -> None:
        """Counts an update that was skipped because of a float16 overflow. Prints a warning for the first one only."""
        self.skips += 1
        self.warn_once(
            f"step {step + 1}: gradients exceed float16's range; the update is skipped and the loss scale halved, now "
            "and at each later overflow (metrics: loss_scale, skipped)"
        )

    def warn_once(self, text: str) -> None:
        """Logs a warning. Prints it too, unless an equal warning was printed before.

        The comparison ignores the text before the first colon, such as `step 12`.
        """
        kind = text.split(":", 1)[-1]
        log.warning(text)
        if kind not in self.warned:
            self.warned.add(kind)
            self.console.warning(text)


def _layers_and_width(config: RunConfig, model: nn.Module) -> tuple[int, int]:
    """Returns the number of layers and the attention width (heads x head size), to count attention FLOPs.

    For a Transformers model, the width is the hidden size. Both are 0 if they are unknown.
    """
    section = config.model
    if isinstance(section, ModelSection):
        return section.all_layers, section.attention_width
    if isinstance(section, TransformersModelSection):
        return getattr(model.config, "num_hidden_layers", 0), getattr(model.config, "hidden_size", 0)
    return 0, 0

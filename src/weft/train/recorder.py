"""Everything a run says: metrics, trackers, the console, the rank's log. Only the first rank speaks and writes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.config.derive import RunLength
from weft.config.foreign import ForeignModelSection
from weft.config.mixture import Plan
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.config.size import flops_per_token
from weft.data.batches.batch import Batch
from weft.data.batches.loader import ValidationBatches
from weft.models.build import matmul_parameters
from weft.observe.console import Console
from weft.observe.flops import device_peak, memory_bytes, memory_kind, mfu, total_peak
from weft.observe.logs import log_to_file
from weft.observe.manifest import end_session, write_manifest
from weft.observe.metrics import MetricsFile
from weft.observe.progress import duration
from weft.observe.report import build_report
from weft.observe.run import RunInfo
from weft.observe.samples import SamplesFile
from weft.observe.tracking import Tracking
from weft.parallel.world import World
from weft.train.choices import DTYPES
from weft.train.run_directory import RunDirectory, reorders

log = logging.getLogger("weft.train")

VALIDATION_LINE = 20.0  # seconds from one line of a long validation to the next


class Recorder:
    """Times the steps and writes down what happened in them.

    Args:
        step: updates made by earlier sessions; what they wrote after it is taken back, for those steps are made again.
        digests: of the data, for the manifest.
        plan: of a mixture: told before the first step, and kept in the manifest.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        run: RunDirectory,
        length: RunLength,
        model: nn.Module,
        step: int,
        digests: dict[str, str],
        console: Console,
        plan: Plan | None = None,
    ):
        self.config, self.world, self.run, self.length, self.console = config, world, run, length, console
        log_to_file(run.path, world.rank)
        self.speaks = world.rank == 0
        parameters = int(world.sum_stages(sum(p.numel() for p in model.parameters()))[0])
        matmul = matmul_parameters(model)
        section = config.model
        layers, width = (
            (section.num_hidden_layers, section.attention_width) if isinstance(section, ModelSection) else (0, 0)
        )
        if isinstance(section, ForeignModelSection):
            layers, width = (getattr(model.config, key, 0) for key in ("num_hidden_layers", "hidden_size"))
        self.flops_of_row = partial(flops_per_token, matmul, layers, width)
        self.flops_per_token = self.flops_of_row(config.data.sequence_length or 0)
        peak = total_peak(world.gather(device_peak(world.device, DTYPES[config.training.dtype])))
        self.peak = peak.flops_per_second
        self.warned: set[str] = set()
        self.skips = 0  # updates of this session that were not made
        self.record: dict[str, Any] = {}
        self.tokens = self.flops = self.seconds = self.data_seconds = self.steps = 0.0
        # The session's first step compiles and takes its first memory: it is told apart from the others.
        self.warmup_seconds: float | None = None
        self.steady_seconds, self.steady_steps, self.told_warmup = 0.0, 0, False
        self.began = time.perf_counter()
        if not self.speaks:
            return
        self.metrics = MetricsFile(run.path)
        self.metrics.keep_until(step)
        self.written_samples = SamplesFile(run.path)
        self.written_samples.keep_until(step)
        info = RunInfo(run.path, run.path.name, config.as_dict(), step or None)
        self.tracking = Tracking(config.log.trackers, info, console)
        write_manifest(
            run.path,
            config.as_dict(),
            ranks=world.ranks,
            mesh=world.shape.sizes,
            parameters=parameters,
            matmul_parameters=matmul,
            flops_per_token=self.flops_per_token,
            peak_flops_per_second=self.peak,
            peak_origin=peak.origin,
            memory_kind=memory_kind(world.device),
            data_digests=digests,
            **({"mixture": plan.as_dict()} if plan is not None else {}),
            steps=length.steps,
            tokens_per_step=length.tokens_per_step,
            resumed_step=step,
        )
        self._introduce(parameters, step, plan)

    def _introduce(self, parameters: int, step: int, plan: Plan | None) -> None:
        training, length = self.config.training, self.length
        self.console.line(
            f"{self.run.path}: {amount(parameters)} parameters, {length.steps:,} steps of "
            f"{length.tokens_per_step:,} tokens ({amount(length.steps * length.tokens_per_step)} in all), "
            f"{training.dtype} on {self.world.ranks} x {self.world.device.type}"
            + (f" ({training.threads} threads)" if self.world.device.type == "cpu" else "")
        )
        for line in plan.lines() if plan is not None else ():
            self.console.line(line)
        if step:
            self.console.line(f"goes on after step {step:,}")
            changes = self.run.changes(self.config)
            for key, (before, now) in changes.items():
                self.console.warning(f"changed since the run last trained: {key}: {before} -> {now}")
            if keys := [key for key in changes if reorders(key)]:
                self.console.warning(
                    f"{', '.join(keys)} decide{'s' * (len(keys) == 1)} which samples a step takes: from here on some "
                    "may come again and others never; --fresh starts over"
                )

    @contextmanager
    def progress(self, step: int) -> Iterator[None]:
        """The progress bar; at the end, the trackers' last words."""
        try:
            with self.console.progress(self.length.steps, "training", unit="step", start=step) as bar:
                self.bar = bar
                yield
        finally:
            if self.speaks:
                self.tracking.close()

    def ended(self, status: str, step: int) -> None:
        """The session is over: note how, and draw the report."""
        if not self.speaks:
            return
        if status == "stopped":
            done = f"after step {step}, saved" if step else "before the first step"
            self.console.line(f"stopped {done}; the same command goes on from there")
        if self.skips:
            self.console.line(f"{self.skips:,} updates were skipped: their gradients were beyond float16's range")
        times: dict[str, float] = {}
        if self.warmup_seconds is not None:
            times["warmup_seconds"] = self.warmup_seconds
        if self.warmup_seconds is not None and self.steady_steps:
            times["steady_step_seconds"] = steady = self.steady_seconds / self.steady_steps
            if self.warmup_seconds > max(2 * steady, steady + 1):
                self.console.line(
                    f"warm-up: the first step took {self.warmup_seconds:.1f} s, those after it {steady:.3g} s "
                    f"({self.length.tokens_per_step / steady:,.0f} tokens/s)"
                )
        end_session(self.run.path, status=status, step=step, **times)
        build_report(self.run.path)

    def begin_step(self) -> None:
        """A step begins: the clock runs from before its data are asked for to after its update."""
        self.began = time.perf_counter()

    def data_arrived(self) -> None:
        """The batch is here."""
        self.data_seconds += time.perf_counter() - self.began

    def end_step(
        self,
        step: int,
        *,
        loss: float,
        lr: float,
        grad_norm: float,
        weight: float,
        row: int,
        balance: dict[str, float] | None = None,
        scaling: dict[str, float] | None = None,
    ) -> None:
        """The update is made. Validation, samples and checkpoints come after it, outside of its time.

        Args:
            row: tokens per row, of which attention's work depends.
            balance: of experts, `ExpertBalance.update`'s.
            scaling: of a scaled loss, `LossScale.metrics`'.
        """
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.began
        self.seconds += seconds
        self.steps += 1
        if self.warmup_seconds is None:
            self.warmup_seconds = seconds
        else:
            self.steady_seconds += seconds
            self.steady_steps += 1
        self.tokens += self.length.tokens_per_step
        self.flops += self.length.tokens_per_step * self.flops_of_row(row)
        speed = self.tokens / self.seconds
        self.record = {
            "step": step,
            "tokens": step * self.length.tokens_per_step,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens_per_second": speed,
            "mfu": mfu(speed, self.flops / self.tokens, self.peak),
            "memory_bytes": memory_bytes(self.world.device),
            "step_seconds": self.seconds / self.steps,
            "data_seconds": self.data_seconds / self.steps,
            "learned_tokens": weight,
            **(balance or {}),
            **(scaling or {}),
            **({} if self.told_warmup else {"warmup_seconds": self.warmup_seconds}),
        }
        if self.speaks:
            self.bar.update(step, loss=loss, lr=lr, tokens_per_second=speed)

    def validating(self, step: int, batches: ValidationBatches) -> Iterator[Batch]:
        """The same batches; how far a long validation is, is told now and then."""
        began = told = time.monotonic()
        for number, batch in enumerate(batches):
            if number and self.speaks and (now := time.monotonic()) - told > VALIDATION_LINE:
                left = duration((now - began) / number * (len(batches) - number))
                self.console.line(f"step {step:,}: validating, batch {number:,} of {len(batches):,}  ETA {left}")
                told = now
            yield batch

    def validated(self, step: int, measured: dict[str, float]) -> None:
        """Held-out measurements join the step's line of metrics."""
        self.record |= measured
        if self.speaks:
            bits = measured.get("validation_bits_per_byte")
            self.console.line(
                f"step {step:,}: validation loss {measured['validation_loss']:.4f}"
                + (f", {bits:.4f} bits per byte" if bits is not None else "")
            )

    def write(self, step: int) -> None:
        """Write the step's line, if one is due."""
        due = step % self.config.log.every == 0 or step == self.length.steps or "validation_loss" in self.record
        if not due:
            return
        self.told_warmup = True
        if self.speaks:
            self.metrics.write(self.record)
            self.tracking.log(step, self.record)
        log.info("%s", self.record)
        self.tokens = self.flops = self.seconds = self.data_seconds = self.steps = 0.0

    def samples(self, step: int, prompts: Sequence[str], texts: Sequence[str]) -> None:
        """Text that the model wrote."""
        if not self.speaks:
            return
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            self.written_samples.write(step, prompt, text)
            self.console.line(f"step {step:,}: {prompt}{text}")
            self.tracking.text(step, f"sample_{number}", prompt + text)

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """A checkpoint is being written."""
        began = time.perf_counter()
        yield
        log.info("saved step %d in %.2f s", step, time.perf_counter() - began)

    def not_finite(self, step: int, loss: float, norm: float, batch: Batch) -> None:
        """The run ends here: say what was seen, where, and what to do."""
        samples = [s for s in batch.samples.tolist() if s >= 0]
        self.console.warning(
            f"step {step + 1}: not finite: the loss is {loss}, the gradient's norm {norm}. This update was not "
            f"made; the weights before it are saved as step {step}. Lower optimizer.lr, lengthen the warm-up or lower "
            f"training.grad_clip, {'compute in bfloat16, ' if self.config.training.dtype == 'float16' else ''}then run "
            f"the same command again (samples {samples[:1]} to {samples[-1:]})"
        )

    def skipped(self, step: int) -> None:
        """A gradient overflowed float16: said once, and at the end how often; counted in the metrics."""
        self.skips += 1
        self.warn_once(
            f"step {step + 1}: gradients beyond float16's range; the update is skipped and the loss scale halved, now "
            "and whenever it comes again (metrics: loss_scale, skipped)"
        )

    def warn_once(self, text: str) -> None:
        """A warning, the first time only of its kind."""
        kind = text.split(":", 1)[-1]
        log.warning(text)
        if kind not in self.warned:
            self.warned.add(kind)
            self.console.warning(text)


def amount(number: float) -> str:
    """A count for people: 640, 30.7k, 1,234.5M."""
    if number < 1e6:
        return f"{number / 1e3:,.1f}k" if number >= 1e3 else f"{number:,}"
    return f"{number / 1e6:,.1f}M"

"""The training loop: batch, loss, backward, clip, update, record, validate, save. One loop for every objective."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoint.save import save
from weft.config.derive import RunLength
from weft.config.errors import UserError
from weft.config.run import RunConfig
from weft.data.batches.batch import Batch
from weft.data.batches.loader import BatchSource, ValidationBatches
from weft.data.tokenizers.tokenizer import Prompt
from weft.generate.sample import generate
from weft.objectives.objective import Objective
from weft.optim.schedule import Schedule
from weft.parallel.axes.balance import ExpertBalance
from weft.parallel.axes.pipeline import PipelinePasses
from weft.parallel.gradients.clip import clip_gradients
from weft.parallel.gradients.compress import PowerSGD
from weft.parallel.gradients.old_rows import OldRows
from weft.parallel.gradients.scaling import LossScale
from weft.parallel.passes import Passes
from weft.parallel.whole import whole_model
from weft.parallel.world import World
from weft.train.choices import DTYPES
from weft.train.recorder import Recorder
from weft.train.stop import StopSignal
from weft.train.validate import BytesPerToken, validate


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: "finished"; "stopped" by a signal; or "non-finite", at a loss or gradient that is no number.
        step: updates made, or skipped for the loss's scale; a checkpoint of them exists.
        loss: of the last update, in nats per token; None if this session made none.
        validation: the last measurements on held-out data.
        signal: the number of the signal that stopped it.
    """

    status: str
    step: int
    loss: float | None
    validation: dict[str, float]
    signal: int | None = None


@dataclass
class Loop:
    """All parts of a run, and the order in which they work. `run(step)` goes on after `step` updates."""

    config: RunConfig
    length: RunLength
    world: World
    directory: Path
    source: BatchSource
    held_out: Callable[[bool], ValidationBatches] | None
    bytes_per_token: BytesPerToken | None
    model: nn.Module
    objective: Objective
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    recorder: Recorder
    prompts: list[Prompt]
    stop_ids: frozenset[int]
    decode: Callable[[list[int]], str] | None
    scale: LossScale
    compress: PowerSGD | None

    def __post_init__(self) -> None:
        kind = PipelinePasses if self.world.shape.pp > 1 else Passes
        self.passes = kind(self.model, self.objective, self.world, self.config.parallel)
        self.balance = ExpertBalance(self.model, self.world)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.old_rows = OldRows(self.model, self.config.training.only_rows_from)
        self.base_lr = [group["lr"] for group in self.optimizer.param_groups]

    def run(self, step: int, stop: StopSignal | None = None) -> Outcome:
        """Train from `step` updates to the end, to a number that is none, or to what `stop` hears on any rank."""
        stop = stop or StopSignal()
        loss, measured, saved_at = None, {}, step
        self.passes.updated()
        batches = iter(self.source.iterate(step, self.length.steps, self.config.data.workers))
        with self.recorder.progress(step):
            while step < self.length.steps:
                self.recorder.begin_step()
                try:
                    batch = next(batches)
                except UserError as mistake:
                    mistake.quiet = not self.world.first_of_rows  # all that have these rows find it
                    raise
                self.recorder.data_arrived()
                # All ranks learn of a signal to any of them at the same step, in the sum that the loss needs anyway.
                weight, learned, *votes = self.world.sum(
                    self.objective.weight(batch), batch.weight.sum(dtype=torch.float64), votes=stop.votes
                )
                if (received := stop.agreed(votes)) is not None:
                    if saved_at != step:
                        self.save(step)
                    return Outcome("stopped", step, loss, measured, received)

                loss = self.accumulate_gradients(batch, weight, learned, step)
                self.old_rows.clear_gradients()
                self.scale.unscale(self.parameters)
                if self.compress is not None:
                    self.compress.reduce(step)
                norm = clip_gradients(self.parameters, self.config.training.grad_clip, self.world.stages)
                finite = math.isfinite(loss) and math.isfinite(norm)
                scaling = self.scale.metrics(finite)
                if not (finite or self.scale.may_skip()):
                    self.optimizer.zero_grad()
                    if saved_at != step:
                        self.save(step)  # the weights that this update would have spoiled
                    self.recorder.not_finite(step, loss, norm, batch)
                    return Outcome("non-finite", step, loss, measured)
                lr = self.set_learning_rate(step)
                if finite:
                    with self.old_rows.unchanged():
                        self.optimizer.step()
                    self.passes.updated()
                else:
                    self.recorder.skipped(step)
                self.scale.update(finite)
                self.optimizer.zero_grad()
                balance = self.balance.update()
                step += 1
                row = self.length.sequence_length // self.pieces(batch)
                self.recorder.end_step(
                    step, loss=loss, lr=lr, grad_norm=norm, weight=weight, row=row, balance=balance, scaling=scaling
                )

                if self.due(step, self.length.checkpoint_every):
                    self.save(step)
                    saved_at = step
                if self.held_out is not None and self.due(step, self.length.validation_every):
                    measured = self.validate(step, whole=step == self.length.steps)
                    self.recorder.validated(step, measured)
                if self.prompts and self.due(step, self.length.samples_every):
                    self.write_samples(step)
                self.recorder.write(step)
        return Outcome("finished", step, loss, measured)

    def due(self, step: int, every: int) -> bool:
        """Whether something that happens every so many steps, and at the end, happens now."""
        return step % every == 0 or step == self.length.steps

    def accumulate_gradients(self, batch: Batch, weight: float, learned: float, step: int) -> float:
        """Gradients of the global batch's mean loss, summed over micro-batches and, in the last one's backward, ranks.

        Args:
            weight: the *global* batch's; the loss is divided by it before the first backward.
            learned: its number of tokens that are learned from, by which the balance of experts is shared out.

        Returns:
            The mean loss, in nats per token (or whatever the objective weighs).
        """
        if weight == 0:
            self.recorder.warn_once(f"step {step + 1}: every token of the batch is masked; its loss counts as 0")
        # Length warm-up cuts sequences into rows: a micro-batch has as many more of them.
        micro_batches = batch.split(self.length.micro_batch_size * self.pieces(batch))
        total = self.passes.train(
            micro_batches,
            weight=weight or 1.0,
            learned=learned,
            seed=partial(self.seed, step),
            factor=self.scale.factor,
        )
        return self.world.sum(total)[0] / (weight or 1.0)

    def pieces(self, batch: Batch) -> int:
        """Rows that each sequence of the batch is cut into."""
        return max(1, len(batch.tokens) // self.length.rows_per_rank)

    def seed(self, step: int, batch: Batch) -> None:
        """Randomness (dropout) is a function of seed, step and sample: nothing to save, nothing that knows of ranks."""
        key = f"{self.config.run.seed} {step} {int(batch.samples[0])}".encode()
        torch.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big", signed=True))

    def set_learning_rate(self, step: int) -> float:
        """Scale every group's own learning rate by the schedule; returns that of the config."""
        factor = self.schedule(step)
        for group, base in zip(self.optimizer.param_groups, self.base_lr, strict=True):
            group["lr"] = base * factor
        return self.optimizer.defaults["lr"] * factor

    def validate(self, step: int, whole: bool) -> dict[str, float]:
        """The loss on the held-out data: the whole at the end, before it as much as `validation.tokens` says."""
        assert self.held_out is not None
        return validate(
            self.model,
            self.passes,
            self.recorder.validating(step, self.held_out(whole)),
            self.world,
            bytes_per_token=self.bytes_per_token,
        )

    def write_samples(self, step: int) -> None:
        """Continue the config's prompts and note what came out.

        Where weights are shared over data ranks alone, all take part; else the first does it with a whole copy of them.
        """
        settings, model, shape = self.config.samples, self.model, self.world.shape
        if shape.pp * shape.cp * shape.tp > 1:
            model = whole_model(model, self.config.model, self.world, DTYPES[self.config.training.dtype])
            if model is None:
                return
        texts: list[list[int]] = [[] for _ in self.prompts]
        model.eval()
        for new in generate(
            model,
            [prompt.ids for prompt in self.prompts],
            first=[prompt.first for prompt in self.prompts],
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            seed=self.config.run.seed,
            stop_ids=self.stop_ids,
        ):
            for text, token in zip(texts, new, strict=True):
                if token is not None and token not in self.stop_ids:
                    text.append(token)
        self.model.train()
        if self.decode is not None:
            self.recorder.samples(step, [prompt.text for prompt in self.prompts], [self.decode(t) for t in texts])

    def save(self, step: int) -> None:
        """A checkpoint of `step` updates: weights, optimizer state, the loss's scale, and the step for all else."""
        settings = self.config.checkpoint
        model: dict[str, Any] = self.config.model.model_dump(mode="json", by_alias=True)
        with self.recorder.saving(step):
            save(
                self.directory,
                step,
                model=self.model,
                optimizer=self.optimizer,
                state={
                    "step": step,
                    "tokens": step * self.length.tokens_per_step,
                    "seed": self.config.run.seed,
                    **self.scale.state(),
                },
                others=self.compress.state() if self.compress is not None else {},
                architecture=model,
                keep_last=settings.keep_last,
                keep_every=settings.keep_every,
            )

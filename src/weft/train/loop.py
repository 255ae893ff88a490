"""The training loop: batch, forward, backward, clip, update, record, validate, save. One loop for all objectives."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.checkpoint.load import checkpoints
from weft.data.batches.batch import Batch
from weft.errors import UserError
from weft.observe.status import LONG, doing
from weft.optim.schedule import Schedule
from weft.parallel.axes.balance import ExpertBalance
from weft.parallel.axes.pipeline import passes_of
from weft.parallel.gradients.clip import gradient_norm, scale_gradients
from weft.parallel.gradients.compress import PowerSGD
from weft.parallel.gradients.frozen_rows import FrozenRows
from weft.parallel.gradients.scaling import LossScale
from weft.parallel.objective import Objective
from weft.parallel.ranks import all_gather_object
from weft.train.ahead import Ahead, batches_ahead, closed_at_end
from weft.train.data import Data
from weft.train.frozen_sources import FrozenModels
from weft.train.given_batches import GivenBatches
from weft.train.hooks import Callbacks
from weft.train.job import Job
from weft.train.learning_rates import ScheduledRates
from weft.train.readings import NOT_READ, Reading, Readings, judge, needs_numbers, report
from weft.train.recorder import Recorder
from weft.train.rollouts.source import RolloutSource
from weft.train.sample_writer import Sampler
from weft.train.saving import Saver
from weft.train.state import State
from weft.train.stop import Outcome, StopRequest
from weft.train.sums import BatchSums, sample_seed
from weft.train.validate import validate
from weft.train.watch.guard import Finding, Guard
from weft.train.watch.integrity import Integrity
from weft.train.watch.monitor import Monitor
from weft.train.watch.reports import raise_unless_possible, warn_of_no_loss
from weft.train.watch.rollback import roll_back


@dataclass
class Loop:
    """The training loop.

    Args:
        objective: the objective. Its scalars include the metrics of `log.metrics` that have `outputs`.
        compress: all-reduces compressed gradients over replicas in place of FSDP2.
        frozen: the frozen models of the objective.
        saved: the state of the checkpoint from which the session resumes; {} for a new run.
    """

    job: Job
    data: Data
    model: nn.Module
    objective: Objective
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    scale: LossScale
    recorder: Recorder
    callbacks: Callbacks = field(default_factory=Callbacks)
    sampler: Sampler | None = None
    compress: PowerSGD | None = None
    frozen: FrozenModels = field(default_factory=FrozenModels)
    saved: dict[str, Any] = field(default_factory=dict)
    new_saver, new_monitor = Saver, Monitor  # `weft profile` replaces them

    def __post_init__(self) -> None:
        self.config, self.world, self.length = self.job.config, self.job.world, self.data.length
        rest = self.objective, self.world, self.config.parallel
        self.passes = passes_of(self.model, *rest, self.frozen.models)
        self.balance = ExpertBalance(self.model, self.world)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.frozen_rows = FrozenRows(self.model, self.config.training.only_rows_from)
        self.rates = ScheduledRates(self.optimizer, self.schedule)
        self.measured: dict[str, float] = {}
        self.saved_at = self.validated_at = 0
        self.ahead = Ahead(None, self.world.device)
        self.saver = self.new_saver(self)
        self.tokens = int(self.saved.get("tokens", 0))  # of all sessions
        self.guard = Guard(self.config.watch, self.saved)
        self.readings, self.numbers = Readings(self.config.training.sync_every), NOT_READ
        self.monitor, self.integrity = self.new_monitor(self), Integrity(self)
        raise_unless_possible(self.guard, self.data.source, self.readings.every)
        if isinstance(self.data.source, RolloutSource):
            self.data.source.attach(self.passes, self.recorder.samples, self.length.samples_every)

    def run(self, step: int, stop: StopRequest | None = None) -> Outcome:
        """Continues a run that has made `step` updates.

        Trains until the run ends, a loss or gradient is not finite, or any rank asks to stop.
        """
        steps = self.length.steps
        assert steps is not None
        with self.recorder.progress(step), self.saver, closed_at_end(self):
            state = self.begin(step, stop or StopRequest())
            if self.guard.may_roll_back and not self.world.agree(lambda: checkpoints(state.path), only_first=True):
                self.save(step)  # so that a rollback is possible from the first step
            batches = batches_ahead(self, step)
            while state.step < steps:
                doing(f"step {state.step + 1:,}", step=state.step + 1)
                self.recorder.begin_step()
                batch = self.next_batch(batches)
                if batch is None:  # a request to stop, before the batch was generated
                    return self.stopped(state.stop.decide(self.world.sum(votes=state.stop.votes)))
                sums, received = self.sum_batch(batch)
                if received is not None:
                    return self.stopped(received)
                found = self.update(batch, sums)
                if found is None:
                    self.after_update(state.step)
                elif found.action == "rollback" and roll_back(self, found):
                    batches.close()
                    batches = batches_ahead(self, state.step)
                else:
                    return self.leave(found.kind, late=found.late)
            return self.leave("finished")

    def begin(self, step: int, stop: StopRequest) -> State:
        """Begins a session that continues after `step` updates. Returns the `State` that callbacks get."""
        self.saved_at, self.measured = step, {}
        self.state = State(
            config=self.config,
            path=self.job.run.path,
            rank=self.world.rank,
            ranks=self.world.ranks,
            model=self.model,
            optimizer=self.optimizer,
            step=step,
            steps=self.length.steps,
            stop=stop,
            weights_replaced=self.passes.after_replacement,
        )
        self.job.watch.loop = self
        self.passes.after_update()
        self.saver.begin(step)
        self.monitor.begin(step)
        self.integrity.begin(step)
        self.callbacks.call("begin", self.state)
        if step and (lost := self.world.agree(lambda: self.recorder.lost_metrics(step, self.saved), only_first=True)):
            self.state.metrics, self.state.logged = lost, self.due(step, self.config.log.every)
            self.finish_step(step)
        else:
            self.repeat_validation(step, missed=not self.saved.get("validated", True))
        return self.state

    def repeat_validation(self, step: int, *, missed: bool) -> None:
        """Repeats a validation that a checkpoint `missed` by being saved before it, if a callback's state needs it."""
        every = self.length.validation_every
        missed = missed and self.data.validates and every is not None and step % every == 0
        if missed and self.callbacks.depend_on_validations:
            self.validate(step)

    def batches(self, step: int) -> Generator[Batch | None]:
        """Yields the batches of the updates from `step` on, without the data that the run skips."""
        source, steps = self.data.source, self.length.steps
        assert steps is not None
        assert not isinstance(source, GivenBatches)
        first = self.guard.data_step(step)
        yield from source.iterate(first, steps + first - step, self.config.data.workers)

    def next_batch(self, batches: Ahead) -> Batch | None:
        """Returns this rank's sequences of the next global batch; None if a rollout was stopped."""
        try:
            batch = next(batches)
        except UserError as error:
            error.quiet |= not self.world.first_of_data_rank  # all ranks with these sequences raise the error
            raise
        self.recorder.data_arrived()
        return batch

    def sum_batch(self, batch: Batch) -> tuple[BatchSums, int | None]:
        """Sums weights and tokens of the global batch over ranks, and counts the ranks' votes to stop.

        Returns:
            The sums, and the decision of all ranks (see `StopRequest.decide`). Both need only one all-reduce.
        """
        stop, size, step = self.state.stop, batch.tokens.shape[1], self.state.step
        weight, learned_here = self.objective.weight(batch), batch.weight.sum(dtype=torch.float64)
        watched = self.monitor.votes(step)
        weight, learned, learned_tokens, tokens, ended, local_due, *votes = self.world.sum(
            weight,
            learned_here,
            (batch.weight > 0).sum(),
            (batch.samples >= 0).sum() * size,
            votes=[*self.saver.votes, *stop.votes, *watched],
        )
        self.saver.decide([ended, local_due])
        self.monitor.decide(votes[len(votes) - len(watched) :], step)
        decision = stop.decide(votes[: len(votes) - len(watched)])
        return BatchSums(weight, learned, int(learned_tokens), int(tokens)), decision

    def stopped(self, decision: int | None) -> Outcome:
        """Ends the session after a decision to stop (see `StopRequest.decide`), and returns its outcome."""
        found, _ = judge(self, self.readings.read())
        if (finding := report(self, found)) is not None:
            return self.leave(finding.kind, late=finding.late)
        if decision == StopRequest.BY_CALLBACK:
            return self.leave("stopped-early", reason=self.stop_reason())
        return self.leave("stopped", signal=decision)

    def stop_reason(self) -> str:
        """Returns the reason of the first rank on which a callback asked to stop."""
        return next(reason for reason in all_gather_object(self.state.stop.reason) if reason is not None)

    def update(self, batch: Batch, sums: BatchSums) -> Finding | None:
        """Makes one step: computes and clips the gradients, updates the weights, and collects metrics.

        Returns:
            The finding because of which the run must end or return to a checkpoint; None otherwise, also if the update
            was skipped. The step does not count after a finding of the gradients.
        """
        state, step = self.state, self.state.step
        state.batch, state.logged = batch, self.due(step + 1, self.config.log.every)
        reading = self.compute_gradients(batch, sums)
        self.ahead.fetch()
        read = self.readings.add(reading, due=needs_numbers(self, step + 1))
        self.monitor.own.reduced()
        judged, finite = judge(self, read)
        found = [finding for finding in (self.integrity.replayed, *judged) if finding is not None]
        scaling, overflow = self.scale.metrics(finite), not finite and self.scale.may_skip()
        updates = not overflow and all(finding.updates for finding in found)
        if not updates:
            self.optimizer.zero_grad()
        if (finding := report(self, found)) is not None:
            return finding
        lr = self.rates.set(step)
        if updates:
            norm = self.numbers.norm if read and read[-1][0] is reading else reading.norm
            scale_gradients(self.parameters, self.config.training.grad_clip, norm)
            with self.frozen_rows.unchanged():
                self.optimizer.step()
            self.passes.after_update()
        elif overflow:
            self.recorder.skipped(step)
        self.monitor.own.updated()
        self.scale.update(finite)
        self.optimizer.zero_grad()
        self.balance.update()
        loss, norm, scalars, balance = self.numbers
        state.step, state.loss, state.updated = step + 1, loss, updates
        self.tokens, size = self.tokens + sums.tokens, batch.tokens.shape[1]
        measured = {"tokens": self.tokens, "loss": loss, "lr": lr, "grad_norm": norm}
        measured["learned_tokens"] = sums.learned_tokens
        state.metrics = self.recorder.end_step(state.step, sums.tokens, size, logged=state.logged, **measured)
        for values in (self.balance.metrics(balance), scaling, scalars):
            state.log(values)
        self.monitor.ended()
        return self.integrity.check_parameters(state.step)

    def compute_gradients(self, batch: Batch, sums: BatchSums) -> Reading:
        """Computes the gradients of a step. Returns its numbers, for which the host does not wait."""
        step, world = self.state.step, self.world
        totals = self.accumulate_gradients(batch, sums.weight, sums.learned, step)
        self.frozen_rows.clear_gradients()
        self.scale.unscale(self.parameters)
        if self.compress is not None:
            self.compress.reduce(step)
        norm = gradient_norm(self.parameters, world.pp_group, world.device)
        return Reading(step, sums.weight, self.passes.scalars, totals, norm, self.balance.measure())

    def after_update(self, step: int) -> None:
        """Calls the callbacks' `step`. Then saves, if due, and finishes the step."""
        self.callbacks.call("step", self.state)
        self.saver.after_update(step)
        self.finish_step(step)

    def finish_step(self, step: int) -> None:
        """Validates, generates samples and writes metrics, each if due. A resumed run does it after a kill."""
        if self.data.validates and self.due(step, self.length.validation_every):
            self.validate(step)
        if self.sampler is not None and self.due(step, self.length.samples_every):
            self.sampler.write(step, self.recorder)
        self.recorder.write(self.state)

    def leave(self, status: str, *, signal: int | None = None, reason: str | None = None, late: int = 0) -> Outcome:
        """Ends the session and returns its outcome. Saves a checkpoint of the last step, unless it is corrupt.

        Args:
            late: number of updates since the step because of which the session ends; such weights are not saved.
        """
        step = self.state.step
        if self.saved_at != step and status != "corruption" and not late:
            self.saver.save_last(step, self.state.stop.agree_on_deadline() if status == "stopped" else None)
        self.saver.end()
        doing("ending the run", "end", LONG)  # callbacks, trackers, the report
        self.state.status = status
        self.callbacks.call("ended", self.state)
        return Outcome(status, step, self.state.loss, self.measured, signal, reason)

    def due(self, step: int, every: int | None) -> bool:
        """Whether to run, after step `step`, an action that runs every `every` steps and after the last step.

        Args:
            every: None for an action that runs only after the last step.
        """
        return (every is not None and step % every == 0) or step == self.length.steps

    def accumulate_gradients(self, batch: Batch, weight: float, learned: float, step: int) -> torch.Tensor:
        """Computes the gradients of the global batch's mean loss, and sums them over micro-batches and ranks.

        Args:
            weight: total weight of the global batch, by which the loss is divided.
            learned: total weight of the tokens of the global batch, which normalizes load balancing losses.

        Returns:
            `Totals.vector` of the global batch, on the device: the sum of the loss, and of the objective's scalars.
        """
        if weight == 0:
            warn_of_no_loss(self.recorder, step)
        micro_batches = batch.split(self.data.micro_batch_size(batch))
        train = partial(
            self.passes.train,
            micro_batches,
            weight=weight or 1.0,
            learned_tokens=learned,
            seed=partial(sample_seed, self.config.run.seed, step),
            loss_scale=self.scale.factor,
        )
        return self.world.sum_on_device(self.integrity.replay(train, step))

    def validate(self, step: int) -> None:
        """Evaluates up to `validation.tokens` tokens (or `prompts`) of each set, or all of them after the last step."""
        show, source = partial(self.recorder.validating, step), self.data.source
        full = step == self.length.steps
        with self.callbacks.validating(self.state):
            if isinstance(source, RolloutSource):
                self.measured = source.validate(step, full=full)
            else:
                self.measured = validate(self.model, self.passes, self.data.held_out, self.world, full=full, show=show)
        if not self.measured:  # a request to stop, which the next step answers
            return
        self.state.metrics |= self.measured
        self.recorder.validated(step, self.measured)
        self.validated_at = step
        self.callbacks.call("validated", self.state)
        self.saver.validated(step, self.measured)

    def save(self, step: int) -> None:
        """Saves a checkpoint of the last step, and waits until it is complete."""
        self.saver.save(step)
        self.saver.finish()

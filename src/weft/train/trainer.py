"""Defines `Trainer`, which trains a model from a checked config."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from weft.checkpoint.load import checkpoints
from weft.config.legal_mesh import check_mesh
from weft.config.run import RunConfig
from weft.config.warnings import warnings
from weft.data.raw.pack_sources import pack_sources
from weft.errors import UserError
from weft.formatting import counted
from weft.observe.console import Console
from weft.observe.logs import stop_log
from weft.parallel.fp8 import raise_unless_usable
from weft.parallel.gradients.scaling import LossScale
from weft.parallel.mesh_view import Mesh
from weft.parallel.ranks import error_on_all_ranks
from weft.parallel.same_run import compare_ranks
from weft.parallel.world import World, start_world
from weft.processes import signal_handler
from weft.train.auto_plan import planned, planned_facts, write_found_plan
from weft.train.auto_settings import kernels_of, prepare_environment
from weft.train.before_packing import check_before_packing
from weft.train.build import Built, build, choose_reductions, components, last_checkpoint, make_schedule, restore
from weft.train.cached_logprobs import fill_logprobs
from weft.train.cached_prepare import cache_prepared
from weft.train.frozen_sources import build_frozen, open_frozen
from weft.train.given_batches import without_training_data
from weft.train.job import prepare
from weft.train.loop import Loop
from weft.train.micro_batch import choose_micro_batch
from weft.train.open_data import open_run_data
from weft.train.preflight import check_run, check_transformers_model, run_facts
from weft.train.recorder import Recorder
from weft.train.run_directory import set_aside_damaged
from weft.train.sample_writer import Sampler
from weft.train.saving import Saver
from weft.train.session import Session
from weft.train.stop import Outcome, StopRequest

log = logging.getLogger("weft.train")


class Trainer:
    """Trains the model of a `RunConfig`, as a single process or as one rank of a torchrun job.

    `fit` makes all steps of the run, with batches from `data.train`:

    >>> config = weft.RunConfig.load("run.yaml", ["run.name=other", "training.steps=2"])
    >>> outcome = weft.Trainer(config, fresh=True).fit()
    >>> outcome.status, outcome.step
    ('finished', 2)

    With `batches`, your own loop makes the steps, with your own batches (see `step`). Then the config needs neither
    `data.train` nor a length of the run:

    >>> with weft.Trainer(config, batches="global", fresh=True) as trainer:
    ...     for step in range(2):
    ...         metrics = trainer.step({"tokens": torch.randint(256, (8, 64))})
    ...     path = trainer.save()
    >>> trainer.step_number, path.name
    (2, 'step-00000002')

    The model, the optimizer and the mesh are built when they are first used, and the last checkpoint of the run is
    restored. `resume` does this explicitly, and returns the number of steps that the run has made.

    Args:
        config: a config that `RunConfig.load` returned.
        batches: what your loop passes to `step`. "global": every rank passes the same global batch, of which Weft
            gives each data parallel rank its part. "local": every rank passes the sequences of its data parallel rank
            (`trainer.mesh.dp_rank`); ranks of `pp`, `cp` and `tp` pass the same ones. Default: `fit` reads the batches.
        fresh: move the content of the run directory aside and start over, in place of resuming.
        from_last_good: move damaged checkpoints aside, and resume from the last undamaged checkpoint.
        accept_changes: resume although changes of the config or the data alter the training. The manifest records them.
        verify: read every byte of the token stores before the first step, to find damage.
        console: the console to print on. By default, only the first rank prints.
    """

    loop: Callable[..., Loop] = Loop  # `weft profile` replaces both
    recorder: Callable[..., Recorder] = Recorder

    def __init__(
        self,
        config: RunConfig,
        *,
        batches: Literal["global", "local"] | None = None,
        fresh: bool = False,
        from_last_good: bool = False,
        accept_changes: bool = False,
        verify: bool = False,
        console: Console | None = None,
    ):
        rank = int(os.environ.get("RANK", 0))
        if fresh and from_last_good:
            error = UserError("fresh starts over, but from_last_good resumes; use only one of the two options")
            error.quiet = rank != 0  # raised on all ranks
            raise error
        if batches not in (None, "global", "local"):
            raise UserError(f"Trainer: batches is {batches!r}; pass 'global' or 'local', or omit it to call fit")
        self.fresh, self.from_last_good = fresh, from_last_good
        self.accept_changes, self.verify = accept_changes, verify
        self.config = self.user_config = config  # `weft profile` trains with a variant of user_config
        self.console = console or Console(prints=rank == 0)
        self.batches: Literal["global", "local"] | None = batches
        if batches is not None:
            self.config = without_training_data(config)
        self._session: Session | None = None
        self._closed_at: int | None = None  # number of steps when the session was closed

    def fit(self) -> Outcome:
        """Trains to the end of the run, or until a signal or a callback stops the run.

        Returns:
            The outcome. A checkpoint of its last step exists in the run directory.

        Raises:
            UserError: an error that the user can correct: invalid data or sizes, a damaged checkpoint, or a full disk.
        """
        if self.batches is not None:
            raise UserError(
                f"Trainer.fit reads data.train, but batches is {self.batches!r}; call step, or omit batches"
            )
        self.config.raise_unless_complete()
        with (built := self._build()).cleanup:
            step, steps, world = built.step, built.data.length.steps, built.job.world
            if steps is not None and step >= steps and built.job.has_ended(step, steps):
                built.job.copy_last()
                self.console.line(built.job.run.nothing_to_do(step, steps))
                world.close()
                return Outcome("finished", step, None, {})
            stop, loop = StopRequest(), self._start(built)
            with signal_handler(stop.receive, *StopRequest.SIGNALS):  # to the end, so that the report is written
                with closing(loop.recorder):
                    outcome = loop.run(step, stop)
                loop.recorder.ended(outcome.status, outcome.step, outcome.reason)
                world.close()
        stop_log()  # not after an exception, whose traceback is logged
        return outcome

    def step(self, batch: Any) -> dict[str, float]:
        """Makes one training step: forward and backward of all micro-batches, clipping, optimizer and schedule.

        Like a step of `fit`, it calls callbacks, and saves, validates, generates text and writes metrics when the
        config says so (`checkpoint.every`, `validation.every`, `samples.every`, `log.every`).

        Args:
            batch: a dict of CPU tensors or arrays, int `[batch, seq]`: `tokens` with optional `labels` (the next
                tokens), or `input_ids` with optional `labels` as in Transformers; labels of -100 have no loss. Optional
                are `weight`, `attention_mask`, `positions`, `segments`. Fields that the objective declares are
                required. Or a `weft.objectives.Batch`, or records that the objective's `batch` converts to such a dict.
                `training.micro_batch_size` is the number of sequences per forward pass. The number of sequences can
                differ from step to step; the last ranks of a short global batch get padding.

        Returns:
            Metric name -> value, equal on all ranks: `loss`, `grad_norm`, `lr`, `tokens`, `tokens_per_second`, ..., the
            objective's scalars, and `validation_loss` after a validation.

        Raises:
            UserError: on all ranks: the batch is not valid, or the loss is not finite. The update was not made, and the
                next step is possible.
            KeyboardInterrupt: Ctrl-C during the step. All weights are those of a complete step, so `save` is possible.
            SystemExit: the process got SIGTERM or SIGHUP, `stopping` is true, and the loop did not end. A checkpoint
                is saved.
        """
        session = self._opened()
        # The loop did not end, although `stopping` was true after the last step.
        if (decision := session.decision) is not None and decision in (signal.SIGTERM, signal.SIGHUP):
            self.close()
            raise SystemExit(128 + decision)
        steps = session.loop.length.steps
        if steps is not None and self.step_number >= steps:
            raise error_on_all_ranks(
                f"{session.built.job.run.path}: the run has made all of its {counted(steps, 'step')}; raise "
                "training.steps, or remove it"
            )
        return session.step(batch)

    def save(self) -> Path:
        """Saves a checkpoint of the last step, as `fit` does, and returns its path. All ranks must call it."""
        loop = self._opened().loop
        loop.save(loop.state.step)
        return checkpoints(loop.job.run.path)[-1]

    def resume(self) -> int:
        """Restores the last checkpoint, as the first `step` does, and returns `step_number`. All ranks must call it."""
        return self.step_number

    def close(self) -> Outcome | None:
        """Ends the session: saves the last step if it is not saved, writes the report and ends the process group.

        All ranks must call it; the `with` statement does, except after an exception. Returns None if no session began.
        """
        if self.batches is not None and self._session is None and self._closed_at is None:
            return None
        session, self._session = self._opened(), None
        self._closed_at = session.loop.state.step
        return session.close()

    @property
    def step_number(self) -> int:
        """Number of steps that the run has made, in all sessions. After a restart, skip the batches of these steps."""
        return self._opened().loop.state.step if self._closed_at is None else self._closed_at

    @property
    def stopping(self) -> bool:
        """Whether the loop should end: any rank got SIGTERM or SIGHUP, or a callback asked to stop. Equal on all ranks.

        After the signal, one more call of `step` saves a checkpoint and raises SystemExit.
        """
        return self._session is not None and self._session.decision is not None

    @property
    def model(self) -> nn.Module:
        """The sharded model; under pipeline parallelism, a module with the layers of this rank's stages."""
        return self._opened().loop.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the model's parameters."""
        return self._opened().loop.optimizer

    @property
    def mesh(self) -> Mesh:
        """The place of this process in the mesh: `tp_rank`, `dp_size`, `pp_group` and so on."""
        return self._opened().mesh

    def log(self, *values: Any) -> None:
        """Prints values like `print`, but only on the first rank, and writes them to this rank's log file."""
        text = " ".join(map(str, values))
        self.console.line(text)
        log.info("%s", text)

    def __enter__(self) -> Trainer:
        self._opened()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        session = self._session
        if session is None:
            return
        if kind is None or (issubclass(kind, KeyboardInterrupt) and session.can_save):
            self.close()
        else:
            self._session, self._closed_at = None, session.loop.state.step
            session.abandon()

    def _opened(self) -> Session:
        """Returns the session of `step`, which is built by the first call."""
        if self.batches is None:
            raise UserError("Trainer: this needs batches='global' or batches='local'; without it, call fit")
        if self._session is None:
            if self._closed_at is not None:
                raise UserError(
                    "Trainer: this trainer is closed; make a new one, which resumes from the last checkpoint"
                )
            built = self._build()
            with ExitStack() as cleanup:
                cleanup.push(built.cleanup)
                mesh = Mesh(built.job.world)
                self._session = Session(built, self._start(built), mesh)
                cleanup.pop_all()
        return self._session

    def _build(self) -> Built:
        """Starts the process group, builds the model and all other components, and restores the last checkpoint."""
        self._pack_sources()
        for line in prepare_environment(self.config):  # before a planned run asks for the name of its GPU
            self.console.line(line)
        self.config = planned(self.config, int(os.environ.get("WORLD_SIZE", 1)), self.console, fresh=self.fresh)
        compare_ranks(lambda: run_facts(self.user_config) | planned_facts(self.config))
        check_mesh(self.config, int(os.environ.get("WORLD_SIZE", 1)))
        with ExitStack() as cleanup:
            world = start_world(self.config.parallel)
            cleanup.callback(world.abandon)
            self._check_and_warn(world)
            saves = getattr(self.loop, "new_saver", Saver) is Saver
            job = prepare(self.config, world, self.console, fresh=self.fresh, saves=saves)
            cleanup.enter_context(job)
            cleanup.enter_context(kernels_of(job.config.training))
            if self.from_last_good:
                for line in world.agree(lambda: set_aside_damaged(job.run.path), only_first=True):
                    self.console.warning(line)
            check_run(job, verify=self.verify)
            objective, callbacks = world.agree(lambda: components(job.config, world))
            job = choose_micro_batch(job, objective, given=self.batches is not None)
            data = open_run_data(job, objective, callbacks, self.batches)
            job.compare_with_last_session(data.digests, data.length.steps, accepted=self.accept_changes)
            checkpoint, fetch = last_checkpoint(job)
            model, optimizer = build(job.config, world, objective, resumes=checkpoint is not None)
            job, compress = choose_reductions(job, model, data.length)
            frozen = open_frozen(job, objective, model)
            state = restore(job, model, optimizer, compress, callbacks, frozen, checkpoint, fetch)
            build_frozen(job, objective, frozen, model, state)
            return Built(job, data, objective, callbacks, model, optimizer, compress, frozen, state, cleanup.pop_all())

    def _start(self, built: Built) -> Loop:
        """Opens the files of the run directory and the trackers, and returns the training loop."""
        job, model, world = built.job, built.model, built.job.world
        check_transformers_model(job, model)
        world.agree(lambda: job.run.write_config(job.config), only_first=True)
        world.agree(lambda: write_found_plan(job.config, world.ranks), only_first=True)
        schedule = world.agree(lambda: make_schedule(job.config, built.data.length.steps))
        sampler = world.agree(lambda: Sampler(job, model))
        loop = self.loop(
            job=job,
            data=built.data,
            model=model,
            objective=built.objective,
            optimizer=built.optimizer,
            schedule=schedule,
            scale=LossScale(job.config.training, built.state),
            recorder=self.recorder(job, built.data, model, built.step, built.frozen.records),
            callbacks=built.callbacks,
            sampler=sampler,
            compress=built.compress,
            frozen=built.frozen,
            saved=built.state,
        )
        with ExitStack() as cleanup:
            cleanup.callback(loop.recorder.close)
            fill_logprobs(job, built.data, built.frozen, loop.passes)
            cache_prepared(job, built.data, built.frozen, loop.passes)
            cleanup.pop_all()
        return loop

    def _pack_sources(self) -> None:
        """Packs raw data before ranks communicate. Of the ranks that share a cache, one packs and the others wait."""
        check_before_packing(self.config, fresh=self.fresh)
        self.config = pack_sources(self.config, self.console)
        self.user_config = self.user_config.model_copy(update={"data": self.config.data})

    def _check_and_warn(self, world: World) -> None:
        """Checks fp8, and prints the warnings of the config, before the run directory is created."""
        if self.config.training.fp8:
            world.agree(lambda: raise_unless_usable(world.device))
        given = self.batches is not None
        for warning in world.agree(lambda: warnings(self.user_config, world.shape, given=given), only_first=True):
            self.console.warning(warning)

"""Defines `Trainer`, which trains a model from a checked config."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
from torch import nn

from weft.checkpoint.huggingface.transformers_files import fill_transformers_model
from weft.checkpoint.load import checkpoints, load, resolve
from weft.config.components import make_component
from weft.config.legal_mesh import check_mesh
from weft.config.run import RunConfig
from weft.config.transformers_model import TransformersModelSection
from weft.config.warnings import warnings
from weft.errors import UserError
from weft.formatting import counted
from weft.models.roles import parameter_roles
from weft.observe.console import Console
from weft.observe.logs import stop_log
from weft.optim.parameter_groups import parameter_groups
from weft.parallel.apply import build_sharded_model
from weft.parallel.fp8 import raise_unless_usable
from weft.parallel.gradients.compress import PowerSGD
from weft.parallel.gradients.scaling import LossScale
from weft.parallel.memory.offload import keep_state_on_host
from weft.parallel.model_state import ModelPlan
from weft.parallel.objective import Objective
from weft.parallel.ranks import error_on_all_ranks
from weft.parallel.same_run import compare_ranks
from weft.parallel.world import World, start_world
from weft.processes import signal_handler
from weft.train.auto_settings import DTYPES
from weft.train.custom_metrics import Metrics
from weft.train.data import layout_of, open_data
from weft.train.hooks import Callbacks
from weft.train.job import Job, prepare
from weft.train.loop import Loop, Outcome
from weft.train.preflight import check_decoder, check_transformers_model, run_facts
from weft.train.recorder import Recorder
from weft.train.run_directory import RunDirectory, set_aside_damaged
from weft.train.sample_writer import Sampler
from weft.train.stop import StopRequest


class Trainer:
    """Trains the model of a `RunConfig`, as a single process or as one rank of a torchrun job.

    >>> config = weft.RunConfig.load("run.yaml", ["run.name=other", "training.steps=2"])
    >>> outcome = weft.Trainer(config, fresh=True).fit()
    >>> outcome.status, outcome.step
    ('finished', 2)

    Args:
        config: a config that `RunConfig.load` returned.
        fresh: move the content of the run directory aside and start over. Otherwise `fit` resumes from the last
            checkpoint.
        from_last_good: move damaged checkpoints aside, and resume from the last undamaged checkpoint.
        console: the console to print on. By default, only the first rank prints.
    """

    loop: Callable[..., Loop] = Loop  # `weft profile` replaces both
    recorder: Callable[..., Recorder] = Recorder

    def __init__(
        self,
        config: RunConfig,
        *,
        fresh: bool = False,
        from_last_good: bool = False,
        console: Console | None = None,
    ):
        rank = int(os.environ.get("RANK", 0))
        if fresh and from_last_good:
            error = UserError("fresh starts over, but from_last_good resumes; use only one of the two options")
            error.quiet = rank != 0  # raised on all ranks
            raise error
        self.config, self.fresh, self.from_last_good = config, fresh, from_last_good
        self.user_config = config  # equal on all ranks; `weft profile` trains with a variant of it
        self.console = console or Console(prints=rank == 0)

    def fit(self) -> Outcome:
        """Trains to the end of the run, or until a signal or a callback stops the run.

        Returns:
            The outcome. A checkpoint of its last step exists in the run directory.

        Raises:
            UserError: an error that the user can correct: invalid data or sizes, a damaged checkpoint, or a full disk.
        """
        compare_ranks(lambda: run_facts(self.user_config))
        check_mesh(self.config, int(os.environ.get("WORLD_SIZE", 1)))
        world, job = start_world(self.config.parallel), None
        try:
            self._check_and_warn(world)
            job = prepare(self.config, world, self.console, fresh=self.fresh)
            if self.from_last_good:
                for line in world.agree(lambda: set_aside_damaged(job.run.path), only_first=True):
                    self.console.warning(line)
            check_decoder(job)
            objective, callbacks = world.agree(lambda: components(job.config, world))
            data = world.agree(lambda: open_data(job.config, world, self.console, layout_of(objective, job.config)))
            model, optimizer = build(job.config, world)
            compress = compressor(job, model)
            state = restore(job, model, optimizer, compress, callbacks)
            if (step := int(state["step"])) >= data.length.steps:
                self.console.line(nothing_to_do(job.run, step, data.length.steps))
                world.close()
                return Outcome("finished", step, None, {})
            check_transformers_model(job, model)
            world.agree(lambda: job.run.write_config(job.config), only_first=True)
            schedule = world.agree(lambda: make_component(job.config.schedule, "schedule", data.length.steps))
            sampler = world.agree(lambda: Sampler(job, model))
            stop, recorder = StopRequest(), self.recorder(job, data, model, step)
            with signal_handler(stop.receive, *StopRequest.SIGNALS):  # to the end, so that the report is written
                with closing(recorder):
                    outcome = self.loop(
                        job=job,
                        data=data,
                        model=model,
                        objective=objective,
                        optimizer=optimizer,
                        schedule=schedule,
                        scale=LossScale(job.config.training, state),
                        recorder=recorder,
                        callbacks=callbacks,
                        sampler=sampler,
                        compress=compress,
                        replay=not state.get("validated", True),
                    ).run(step, stop)
                recorder.ended(outcome.status, outcome.step, outcome.reason)
                world.close()
            stop_log()  # not after an exception, whose traceback is logged
            return outcome
        except BaseException:
            world.abandon()
            raise
        finally:
            if job is not None:
                job.run.release()  # this process may train here again

    def _check_and_warn(self, world: World) -> None:
        """Checks fp8, and prints the warnings of the config, before the run directory is created."""
        if self.config.training.fp8:
            world.agree(lambda: raise_unless_usable(world.device))
        for warning in world.agree(lambda: warnings(self.user_config, world.shape), only_first=True):
            self.console.warning(warning)


def components(config: RunConfig, world: World) -> tuple[Objective, Callbacks]:
    """Returns the objective and the callbacks of a run, both with the metrics of `log.metrics`.

    Metrics with the method `outputs` become scalars of the objective. The first callback calls the metrics' method
    `step`.
    """
    metrics = Metrics(config.log.metrics, make_component(config.objective, "objective"), world)
    return metrics.objective, Callbacks(config.callbacks, metrics)


def build(config: RunConfig, world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns the sharded model with initial weights, and its optimizer."""
    model = build_sharded_model(model_plan(config), world)
    groups = parameter_groups(model, parameter_roles(model), config.optimizer.no_decay)
    optimizer = make_component(config.optimizer, "optimizer", groups)
    if config.parallel.offload == "optimizer":
        keep_state_on_host(optimizer, world.device)
    return model, optimizer


def model_plan(config: RunConfig) -> ModelPlan:
    """Returns the plan from which the model of the run is built."""
    training = config.training
    return ModelPlan(
        config.model,
        config.parallel,
        dtype=DTYPES[training.dtype],
        reduce_dtype=DTYPES.get(training.reduce_dtype),  # None for "auto"
        seed=config.run.seed,
        compile=training.compile,
        activation_checkpointing=training.activation_checkpointing,
        only_rows_from=training.only_rows_from,
        sequence=config.data.sequence_length or 0,
        fp8=training.fp8,
    )


def compressor(job: Job, model: nn.Module) -> PowerSGD | None:
    """Returns the `PowerSGD` that all-reduces gradients instead of FSDP2; None without `parallel.compress`."""
    config, world = job.config, job.world
    section, training = config.parallel.compress, config.training
    if section is None:
        return None
    state = torch.promote_types(DTYPES[training.dtype], torch.float32)
    made = PowerSGD(section, model, world, dtype=DTYPES.get(training.reduce_dtype, state), seed=config.run.seed)
    if not made.matrices:
        raise error_on_all_ranks(
            f"parallel.compress.rank: low-rank factors of rank {section.rank} are too large to compress any gradient; "
            "lower the rank"
        )
    exact = f"exactly for {section.start_step:,} steps, then " if section.start_step else ""
    job.console.line(
        f"{world.shape.dp_replicate} replicas all-reduce their gradients: {exact}{made.share:.2%} of the values "
        f"(matrices as low-rank factors of rank {section.rank})"
    )
    return made


def restore(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, compress: PowerSGD | None, callbacks: Callbacks
) -> dict[str, Any]:
    """Loads the last checkpoint of the run. For a new run, loads the weights of `model.from` or `model.path`, if set.

    Returns:
        The saved state: `step` (number of updates) and the other values of the checkpoint; `{"step": 0}` for a new run.
    """
    config, path, world = job.config, job.run.path, job.world
    if world.agree(lambda: bool(checkpoints(path)), only_first=True):
        checkpoint = world.agree(lambda: resolve(path))

        def others(saved: dict[str, list[int]]) -> dict[str, torch.Tensor]:
            blank = compress.blank_state(saved) if compress is not None else {}
            return blank | callbacks.empty_tensors(checkpoint, model)

        state = load(checkpoint, model=model, optimizer=optimizer, others=others)
        if compress is not None:
            compress.use_loaded()
        world.agree(lambda: callbacks.load_state_dict(state.get("callbacks", {})))
        return state
    section = config.model
    if isinstance(section, TransformersModelSection) and section.from_ is None and section.weights:
        world.agree(lambda: fill_transformers_model(model, section))
    if (source := section.from_) is not None:
        checkpoint = world.agree(lambda: resolve(source))
        load(checkpoint, model=model, optimizer=optimizer if section.load_optimizer else None)
    return {"step": 0}


def nothing_to_do(run: RunDirectory, step: int, steps: int) -> str:
    """Returns the message for a run that has already made all its steps.

    Args:
        step: number of steps that the run has made.
        steps: length of the run according to its config.
    """
    where = "finished" if step == steps else "past its length"
    return (
        f"{run.path}: this run is {where}: it has made {counted(step, 'step')}, and its length is {steps:,}; "
        "nothing to do; raise training.steps to continue, or use --fresh to start over"
    )

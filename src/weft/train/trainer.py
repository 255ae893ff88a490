"""From a checked config to a trained model: the wiring of all rooms."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.checkpoint.huggingface.transformers_files import fill_transformers_model
from weft.checkpoint.load import checkpoints, load, resolve
from weft.config.components import load_class
from weft.config.legal_mesh import check_mesh
from weft.config.run import RunConfig
from weft.config.training import TrainingSection
from weft.config.transformers_model import TransformersModelSection
from weft.config.warnings import warnings
from weft.formatting import counted
from weft.models.roles import parameter_roles
from weft.observe.console import Console
from weft.optim.parameter_groups import parameter_groups
from weft.optim.schedule import Schedule
from weft.parallel.apply import build_sharded_model
from weft.parallel.fp8 import raise_unless_usable
from weft.parallel.gradients.compress import PowerSGD
from weft.parallel.gradients.scaling import LossScale
from weft.parallel.memory.offload import keep_state_on_host
from weft.parallel.model_state import ModelPlan
from weft.parallel.ranks import mistake
from weft.parallel.same_run import compare_ranks
from weft.parallel.world import World, start_world
from weft.processes import signal_handler
from weft.train.auto_settings import DTYPES, apply_choices, choose
from weft.train.custom_metrics import Metrics
from weft.train.data import Data, layout_of, open_data
from weft.train.hooks import Callbacks
from weft.train.job import Job
from weft.train.loop import Learner, Loop, Outcome
from weft.train.preflight import examine_decoder, examine_transformers_model
from weft.train.recorder import Recorder
from weft.train.run_directory import RunDirectory, claim, set_aside_damaged
from weft.train.run_identity import run_facts
from weft.train.sample_writer import Sampler
from weft.train.stop import StopRequest


class Trainer:
    """Trains what a `RunConfig` describes, alone or as one rank of a torchrun job.

    >>> config = weft.RunConfig.load("run.yaml", ["run.name=other", "training.steps=2"])
    >>> outcome = weft.Trainer(config, fresh=True).fit()
    >>> outcome.status, outcome.step
    ('finished', 2)

    Args:
        config: from `RunConfig.load`.
        fresh: set aside what the run directory holds, and start over. Otherwise `fit` goes on from its last checkpoint.
        from_last_good: set damaged checkpoints aside, and go on from the last undamaged one.
        console: where to speak; by default stderr, by the first rank.
    """

    loop: Callable[..., Loop] = Loop  # what takes the steps, and what tells of them: `weft profile` has its own
    recorder: Callable[..., Recorder] = Recorder

    def __init__(
        self,
        config: RunConfig,
        *,
        fresh: bool = False,
        from_last_good: bool = False,
        console: Console | None = None,
    ):
        self.config, self.fresh, self.from_last_good = config, fresh, from_last_good
        self.compared = (
            config  # what the user asked for, alike on all ranks: `weft profile` trains a part of it elsewhere
        )
        self.console = console or Console(speaks=int(os.environ.get("RANK", 0)) == 0)

    def fit(self) -> Outcome:
        """Train to the end of the run, or to a signal.

        Returns:
            How it ended; a checkpoint of its last step exists in the run directory.

        Raises:
            UserError: whatever the user can mend: data, sizes, a damaged checkpoint, a full disk.
        """
        compare_ranks(lambda: run_facts(self.compared))
        check_mesh(self.config, int(os.environ.get("WORLD_SIZE", 1)))
        world, job = start_world(self.config.parallel), None
        try:
            if self.config.training.fp8:  # before there is a run directory
                world.agree(lambda: raise_unless_usable(world.device))
            for warning in warnings(self.compared, world.shape, open_data=world.rank == 0):
                self.console.warning(warning)
            job = prepare(self.config, world, self.console, fresh=self.fresh)
            if self.from_last_good:
                for line in world.agree(lambda: set_aside_damaged(job.run.path), only_first=True):
                    self.console.warning(line)
            examine_decoder(job)
            metrics, callbacks = world.agree(lambda: components(job.config))
            data = world.agree(
                lambda: open_data(job.config, world, self.console, layout_of(metrics.objective, job.config))
            )
            model, optimizer = build(job.config, world)
            compress = compressor(job, model)
            state = world.agree(lambda: restore(job, model, optimizer, compress, callbacks))
            if (step := int(state["step"])) >= data.length.steps:
                self.console.line(nothing_to_do(job.run, step, data.length.steps))
                world.close()
                return Outcome("finished", step, None, {})
            examine_transformers_model(job, model)
            world.agree(lambda: job.run.write_config(job.config), only_first=True)
            schedule, scale = make_schedule(job.config, data), LossScale(job.config.training, state)
            loop = self.loop(
                job,
                data,
                Learner(model, metrics, optimizer, schedule, scale, compress),
                self.recorder(job, data, model, step),
                Sampler(job, model),
                callbacks,
                replay=not state.get("validated", True),
            )
            stop = StopRequest()
            with signal_handler(stop.receive, *StopRequest.SIGNALS):  # to the end, so that trackers are closed
                outcome = loop.run(step, stop)
                loop.recorder.ended(outcome.status, outcome.step, outcome.reason)
                world.close()
            return outcome
        except BaseException:
            world.abandon()
            raise
        finally:
            if job is not None:
                job.run.release()  # the process may go on, and train here again


def prepare(config: RunConfig, world: World, console: Console, *, fresh: bool) -> Job:
    """Claim the run directory; fill in what Weft chooses, once a run and alike on all ranks."""
    path = config.run_directory
    lock = world.agree(lambda: claim(path, fresh=fresh), only_first=True)
    run = RunDirectory(path, lock if world.rank == 0 else None)
    config = run.with_choices(config)
    chosen = world.agree(lambda: choose(config.training, world.device).model_dump(), only_first=True)
    config = config.model_copy(update={"training": TrainingSection(**chosen)})
    apply_choices(config.training)
    return Job(config, world, run, console)


def components(config: RunConfig) -> tuple[Metrics, Callbacks]:
    """The objective with the metrics of the run file around it, and the callbacks."""
    objective = load_class(config.objective, "objective")(**config.objective.arguments)
    return Metrics(config.log.metrics, objective), Callbacks(config.callbacks)


def make_schedule(config: RunConfig, data: Data) -> Schedule:
    """The schedule, over the run's length."""
    return load_class(config.schedule, "schedule")(data.length.steps, **config.schedule.arguments)


def build(config: RunConfig, world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The sharded model at its initial weights, and its optimizer."""
    model = build_sharded_model(model_plan(config), world)
    groups = parameter_groups(model, parameter_roles(model), config.optimizer.no_decay)
    optimizer = load_class(config.optimizer, "optimizer")(groups, **config.optimizer.arguments)
    if config.parallel.offload == "optimizer":
        keep_state_on_host(optimizer, world.device)
    return model, optimizer


def model_plan(config: RunConfig) -> ModelPlan:
    """What the run's model is to become."""
    training = config.training
    return ModelPlan(
        config.model,
        config.parallel,
        dtype=DTYPES[training.dtype],
        reduce_dtype=DTYPES.get(training.reduce_dtype),  # auto is none of them
        seed=config.run.seed,
        compile=training.compile,
        activation_checkpointing=training.activation_checkpointing,
        only_rows_from=training.only_rows_from,
        sequence=config.data.sequence_length or 0,
        fp8=training.fp8,
    )


def compressor(job: Job, model: nn.Module) -> PowerSGD | None:
    """What sums gradients over the copies of the model, if FSDP2 is not to."""
    config, world = job.config, job.world
    section, training = config.parallel.compress, config.training
    if section is None:
        return None
    state = torch.promote_types(DTYPES[training.dtype], torch.float32)
    made = PowerSGD(section, model, world, dtype=DTYPES.get(training.reduce_dtype, state), seed=config.run.seed)
    if not made.matrices:
        raise mistake(f"parallel.compress.rank: factors of rank {section.rank} make no matrix smaller; lower it")
    exact = f"exactly for {section.start_step:,} steps, from there on " if section.start_step else ""
    job.console.line(
        f"{world.shape.dp_replicate} copies tell one another their gradients: {exact}{made.share:.2%} of the numbers "
        f"(matrices by factors of rank {section.rank})"
    )
    return made


def restore(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, compress: PowerSGD | None, callbacks: Callbacks
) -> dict[str, Any]:
    """Go on from the run's last checkpoint; or start from the one that `model.from` names, or from `model.path`.

    Returns:
        What the loop goes on from: `step`, the number of updates made so far, and what else was saved with them.
    """
    config, path = job.config, job.run.path
    if checkpoints(path):
        checkpoint = resolve(path)

        def others(saved: dict[str, list[int]]) -> dict[str, torch.Tensor]:
            blank = compress.blank_state(saved) if compress is not None else {}
            return blank | callbacks.blank_state(checkpoint, model)

        state = load(checkpoint, model=model, optimizer=optimizer, others=others)
        if compress is not None:
            compress.restored()
        callbacks.restored(state.get("callbacks", {}))
        return state
    if isinstance(config.model, TransformersModelSection) and config.model.from_ is None and config.model.weights:
        fill_transformers_model(model, config.model)
    if config.model.from_ is not None:
        load(resolve(config.model.from_), model=model, optimizer=optimizer if config.model.load_optimizer else None)
    return {"step": 0}


def nothing_to_do(run: RunDirectory, step: int, steps: int) -> str:
    """What a run says that has made all its steps. Nothing is written: the saved config stays that of its training."""
    where = "finished" if step == steps else "past its length"
    return (
        f"{run.path}: this run is {where}: it has made {counted(step, 'step')}, and its length is {steps:,}; "
        "nothing to do; lengthen it (training.steps), or --fresh starts over"
    )

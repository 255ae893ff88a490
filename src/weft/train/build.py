"""Builds the components, the model and the optimizer of a run, and restores the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoint.adapter_record import AdapterRecord, saved_record
from weft.checkpoint.adapter_start import open_start
from weft.checkpoint.base_model import base_path, load_base
from weft.checkpoint.checkpoint_files import FOLDER, step_of
from weft.checkpoint.huggingface.transformers_files import fill_transformers_model
from weft.checkpoint.load import checkpoints, load, resolve
from weft.checkpoint.local import find_local
from weft.checkpoint.local_record import recorded
from weft.checkpoint.model_parts import new_parts
from weft.checkpoint.survivors import newest_survivor
from weft.config.components import make_component
from weft.config.derive import Intervals, RunLength
from weft.config.rules import MOST_STEPS
from weft.config.run import RunConfig
from weft.config.transformers_model import TransformersModelSection
from weft.errors import UserError
from weft.models.adapter import saved_with_adapter
from weft.models.roles import parameter_roles
from weft.optim.parameter_groups import parameter_groups
from weft.optim.schedule import Schedule
from weft.parallel.adapter import fill_from_base, subtract_initial_product
from weft.parallel.apply import build_sharded_model, fill
from weft.parallel.gradients.compress import PowerSGD
from weft.parallel.gradients.reduction import choose_reduction
from weft.parallel.memory.offload import keep_state_on_host
from weft.parallel.model_state import BaseModel, model_plan, state_of
from weft.parallel.objective import Objective
from weft.parallel.ranks import all_gather_object, error_on_all_ranks
from weft.parallel.world import World
from weft.train.auto_settings import DTYPES
from weft.train.before_packing import check_patterns, patterns
from weft.train.custom_metrics import Metrics
from weft.train.data import Data
from weft.train.frozen_sources import FrozenModels
from weft.train.hidden_states import hidden_projections
from weft.train.hooks import Callbacks
from weft.train.job import Job
from weft.train.learning_rates import learning_rate_factors, scale_learning_rates
from weft.train.module_plan import build_planned_model
from weft.train.run_directory import unfinished_run


@dataclass(frozen=True)
class Built:
    """A run that is built and restored, before its first step.

    Attributes:
        compress: all-reduces compressed gradients over replicas in place of FSDP2; None without `parallel.compress`.
        frozen: the frozen models of the objective.
        state: the values of the checkpoint that was restored; only `step` (0) for a new run.
        cleanup: unlocks the run directory, and destroys the process group after a failure. Close it at the end.
    """

    job: Job
    data: Data
    objective: Objective
    callbacks: Callbacks
    model: nn.Module
    optimizer: torch.optim.Optimizer
    compress: PowerSGD | None
    frozen: FrozenModels
    state: dict[str, Any]
    cleanup: ExitStack

    @property
    def step(self) -> int:
        """Number of updates of earlier sessions."""
        return int(self.state["step"])


def make_schedule(config: RunConfig, steps: int | None) -> Schedule:
    """Returns the schedule of the run.

    Args:
        steps: number of updates of the run; None if the run has no length.

    Raises:
        UserError: the schedule depends on the length, and the run has none.
    """
    section = config.schedule
    if steps is None and (section.type != "constant" or section.arguments.get("warmup_fraction")):
        what = "warmup_fraction" if section.type == "constant" else f"the schedule {section.type}"
        remedy = "warmup_steps" if section.type == "constant" else "schedule: {type: constant}"
        raise UserError(f"schedule: {what} depends on the length of the run; set training.steps, or {remedy}")
    return make_component(section, "schedule", MOST_STEPS if steps is None else steps)


def components(config: RunConfig, world: World) -> tuple[Objective, Callbacks]:
    """Returns the objective and the callbacks of a run, both with the metrics of `log.metrics`.

    Metrics with the method `outputs` become scalars of the objective. The first callback calls the metrics' method
    `step`.
    """
    metrics = Metrics(config.log.metrics, make_component(config.objective, "objective"), world)
    return metrics.objective, Callbacks(config.callbacks, metrics)


def build(
    config: RunConfig, world: World, objective: Objective | None = None, *, resumes: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns the sharded model, and its optimizer. The weights are initial ones, except for those that `restore` sets.

    Args:
        objective: the run's objective, if the model needs the projections of its hidden states.
        resumes: whether `restore` will load a checkpoint of the run, so that no weights are drawn.

    Raises:
        UserError: the objective compares hidden states that the models do not have.
    """
    sizes = world.agree(lambda: hidden_projections(config, objective, world.shape)) if objective is not None else {}
    starts_from = config.model.from_ is not None and config.adapter is None
    plan = replace(model_plan(config), projections=sizes, draw=not (resumes or starts_from))
    planned = config.parallel.plan is not None
    model = build_planned_model(config, plan, world) if planned else build_sharded_model(plan, world)
    _check_patterns(config, model, world)
    roles = parameter_roles(model)
    factors = learning_rate_factors(model, roles, config.optimizer)
    groups = parameter_groups(model, roles, config.optimizer.no_decay, factors)
    optimizer = make_component(config.optimizer, "optimizer", groups)
    scale_learning_rates(optimizer)
    if config.parallel.offload == "optimizer":
        keep_state_on_host(optimizer, world.device)
    return model, optimizer


def _check_patterns(config: RunConfig, model: nn.Module, world: World) -> None:
    """Raises UserError if a pattern of parameter names is wrong (see `check_patterns`), on all ranks."""
    if not patterns(config):
        return
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for stage in all_gather_object(trained) if world.shape.pp > 1 else ():
        trained |= stage
    world.agree(lambda: check_patterns(config, trained))


def choose_reductions(job: Job, model: nn.Module, length: Intervals) -> tuple[Job, PowerSGD | None]:
    """Chooses when the gradients of a model are reduced over the ranks, and prints the choice if there is one.

    Args:
        length: length of the run. The choice does not matter, and is not printed, if a step has one micro-batch.

    Returns:
        The job with the choice, and the `PowerSGD` that all-reduces gradients instead of FSDP2; None without
        `parallel.compress`.
    """
    config, world = job.config, job.world
    kept = world.agree(lambda: job.run.kept_reduction(world.shape.sizes), only_first=True)
    if (found := choose_reduction(model, world, kept)) is not None:
        choice, line = found
        job = replace(job, reduction=choice)
        if not isinstance(length, RunLength) or length.accumulation > 1:
            job.console.line(line)
    section, training = config.parallel.compress, config.training
    if section is None:
        return job, None
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
    return job, made


def restore(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compress: PowerSGD | None,
    callbacks: Callbacks,
    frozen: FrozenModels,
    checkpoint: Path | None,
    fetch: Callable[[set[str]], None] | None = None,
) -> dict[str, Any]:
    """Loads a checkpoint of the run. For a new run, loads the weights of `model.from` or `model.path`, if set.

    Args:
        checkpoint: the checkpoint; None for a new run.
        fetch: argument of `load`.

    Returns:
        The saved state: `step` (number of updates) and the other values of the checkpoint; `{"step": 0}` for a new run.
    """
    config, world = job.config, job.world
    adapter, select = config.adapter, None if config.adapter is None else saved_with_adapter(config.model)
    if checkpoint is not None:
        if adapter is not None:
            restore_base(job, model, world.agree(lambda: saved_record(checkpoint, adapter)))

        def others(saved: dict[str, list[int]]) -> dict[str, torch.Tensor]:
            blank = compress.blank_state(saved) if compress is not None else {}
            return blank | callbacks.empty_tensors(checkpoint, model) | frozen.empty_tensors(saved)

        state = load(checkpoint, model=model, optimizer=optimizer, others=others, select=select, fetch=fetch)
        if adapter is not None:
            subtract_initial_product(model, adapter)
        if compress is not None:
            compress.use_loaded()
        world.agree(lambda: callbacks.load_state_dict(state.get("callbacks", {})))
        return state
    section = config.model
    if adapter is not None:
        start = world.agree(lambda: open_start(adapter, section))
        base = restore_base(job, model, None if start is None else start.record(adapter))
        for text in base.lacks if start is None or not start.heads else ():
            job.console.line(text.format(base.path))
        if start is None:
            fill_from_base(model, adapter)
        else:
            start.fill(model, adapter, config.run.seed)
        subtract_initial_product(model, adapter)
        return {"step": 0}
    if isinstance(section, TransformersModelSection) and section.from_ is None and section.weights:
        world.agree(lambda: fill_transformers_model(model, section))
    if (source := section.from_) is not None:
        checkpoint = world.agree(lambda: resolve(source))
        projects = bool(getattr(model, "projections", None))
        select, new = world.agree(lambda: new_parts(section, checkpoint, projects=projects))
        for text in new:
            job.console.line(text.format(source))
        if select is not None and (built := state_of(model)) is not None:
            fill(model, built.plan, lambda name: not select(name))
        load(checkpoint, model=model, optimizer=optimizer if section.load_optimizer else None, select=select)
    return {"step": 0}


def last_checkpoint(job: Job) -> tuple[Path | None, Callable[[set[str]], None] | None]:
    """Returns the checkpoint from which a run resumes: the newest one that survives, local or in the run directory.

    Prints a warning if a newer local checkpoint is incomplete, or if no host has the local checkpoints any more.

    Returns:
        The path, None for a new run; and the argument `fetch` of `load`.
    """
    path, world = job.run.path, job.world
    durable = world.agree(lambda: [step_of(one) or 0 for one in checkpoints(path)], only_first=True)
    if (local := find_local(path, job.config.checkpoint.local)) is not None:
        survivor, problems = newest_survivor(local, max(durable, default=0))
        if problems:
            step = max(durable, default=0) if survivor is None else step_of(survivor.path)
            job.console.warning(f"{'; '.join(problems)}; the run resumes from step {step:,}")
        if survivor is not None:
            job.console.line(f"resuming from the local checkpoint {survivor.path}")
            return survivor.path, survivor.fetch
    elif (lost := world.agree(lambda: recorded(path), only_first=True)) is not None:
        saved = f"resumes from step {max(durable):,}, the last one in {path / FOLDER}" if durable else "starts over"
        job.console.warning(
            f"the local checkpoints of this run are lost: {lost.folder} is gone on all hosts (a restart of a host "
            f"empties its memory); the run {saved}"
        )
    return (world.agree(lambda: resolve(path)) if durable else None), None


def restore_base(job: Job, model: nn.Module, record: AdapterRecord | None) -> BaseModel:
    """Loads the weights of an adapter run's base model, and returns it.

    Args:
        record: the record of the checkpoint from which the run resumes; None for a new run.
    """
    section, state = job.config.model, state_of(model)
    assert state is not None
    path = job.world.agree(lambda: base_path(section))
    if (run := unfinished_run(path)) is not None:
        job.console.warning(
            f"the adapter needs its base model {path}, but {run} is not finished and can delete this checkpoint "
            "(checkpoint.keep_last); copy the checkpoint, and set model.from to the copy"
        )
    state.base = load_base(model, section, path, record)
    return state.base

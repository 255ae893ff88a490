"""Trains a custom model by a plan of `weft parallelize`: one that a file has, or that `parallel: auto` finds."""

from __future__ import annotations

import hashlib
import inspect
import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.config.components import load_class
from weft.config.derive import batch_sequences, sequence_length, split_batch
from weft.config.mesh import MeshShape, ParallelSection
from weft.config.model import CustomModelSection
from weft.config.plan_rules import is_custom
from weft.config.run import RunConfig
from weft.errors import UserError
from weft.parallel.apply import build_stages, freeze, use_frozen_dtype, use_state_dtype
from weft.parallel.axes.pipeline import SCHEDULES
from weft.parallel.axes.single_rank import cast_outputs
from weft.parallel.local_parameters import local
from weft.parallel.model_state import ATTRIBUTE, ModelPlan, ModelState
from weft.parallel.world import World

if TYPE_CHECKING:
    from weft.planner.parallelize.plan import Plan

FILE = "plan.py"  # in the run directory: the plan that `parallel: auto` found


def uses_plan(config: RunConfig) -> bool:
    """Whether a run trains a custom model by a plan."""
    return config.parallel.plan is not None or (config.parallel.auto and is_custom(config.model.type))


def planned_module(config: RunConfig, ranks: int, hardware: str, *, fresh: bool) -> tuple[RunConfig, str]:
    """Returns the config with the mesh of its plan, and a line about the plan. Every rank finds the same.

    With `parallel.auto`, the plan of the last session is kept if it is for this model and as many ranks.

    Args:
        ranks: world size.
        hardware: name of the hardware file for which `parallel.auto` plans.
        fresh: whether the run starts over.

    Raises:
        UserError: the plan is for another number of ranks, cannot be read, or none is found.
    """
    section, own = config.parallel, str(config.run_directory / FILE)
    if section.auto and section.plan not in (None, own):
        raise UserError(f"parallel.plan: {section.plan}, but parallel.auto finds a plan; remove one of the two keys")
    changed = section.model_copy(update={"plan": section.plan or own, "hardware": hardware if section.auto else None})
    config = config.model_copy(update={"parallel": changed})
    plan = plan_of(config, ranks, fresh=fresh)
    pipeline = f"pp {plan.pp} x " if plan.stages else ""
    if plan.devices != ranks:
        raise UserError(
            f"parallel.plan: {section.plan} is for {plan.devices} devices ({pipeline}dp {plan.dp} x tp {plan.tp}), and "
            f"the run has {ranks}; start {plan.devices} (--nproc {plan.devices}), or plan for {ranks} devices"
        )
    keys = _keys_of(plan)
    for name, value in keys.items():
        if getattr(section, name) not in (value, ParallelSection.model_fields[name].default):
            raise UserError(f"parallel.{name}: {getattr(section, name)}, but the plan has {value}; remove the key")
    usual = ParallelSection(pp_schedule=keys["pp_schedule"]).virtual_stages
    keys["stages_per_rank"] = keys["stages_per_rank"] if keys["stages_per_rank"] != usual else None
    keys["hardware"] = section.hardware
    chosen = config.model_copy(update={"parallel": changed.model_copy(update=keys)})
    seconds = plan.prediction.get("step_seconds")
    cost = f"; {seconds:.3g} s per micro-batch predicted" if seconds and section.auto else ""
    mesh = f"{pipeline.replace(' x', ',')}dp {plan.dp}, tp {plan.tp}"
    return chosen, f"parallel: {mesh} ({'auto' if section.auto else section.plan}{cost})"


def _keys_of(plan: Plan) -> dict[str, Any]:
    """Returns the keys of `parallel` that a plan decides, with their values.

    Raises:
        UserError: the schedule of the plan's stages is not supported.
    """
    names = {name: short for short, name in SCHEDULES.items()}
    schedule = plan.schedule if plan.stages else SCHEDULES["1f1b"]
    if schedule not in names:
        raise UserError(f"plan: schedule {schedule!r} is not supported; use one of {', '.join(names)}")
    return {
        "pp": plan.pp,
        "dp_shard": plan.dp,
        "tp": plan.tp,
        "pp_schedule": names[schedule],
        "stages_per_rank": len(plan.stages) // plan.pp or 1,
    }


def plan_of(config: RunConfig, ranks: int, *, fresh: bool = False) -> Plan:
    """Returns the plan of a run with `parallel.plan`: from the file or, if it has none for the run, by a search."""
    from weft.planner.parallelize.read import read_plan

    section, model = config.parallel, config.model
    assert section.plan is not None
    assert isinstance(model, CustomModelSection)
    if not section.auto:
        return read_plan(section.plan)
    if not fresh and Path(section.plan).is_file():
        kept = read_plan(section.plan)
        if kept.devices == ranks and kept.structure == _structure_of(_text(model)):
            return kept
    given, length = config.training.micro_batch_size, sequence_length(config)
    _, micro = split_batch(batch_sequences(config), length, MeshShape(dp_shard=ranks), given, section)
    rows = min(batch_sequences(config), micro * ranks)
    return _searched(_text(model), rows, length, ranks, section.hardware)


def module_facts(config: RunConfig) -> dict[str, str]:
    """Returns name -> text of the plan, which must be equal on all ranks."""
    from weft.planner.parallelize.read import NAMES

    section = config.parallel
    values = plan_of(config, section.pp * section.dp_shard * section.tp).to_json()
    tables = json.dumps({name: values[name] for name in NAMES.values()}, sort_keys=True)
    return {"parallel.plan": hashlib.sha256(tables.encode()).hexdigest()[:16]}


def build_planned_model(config: RunConfig, plan: ModelPlan, world: World) -> nn.Module:
    """Builds a custom model, and applies the plan of the run. Its state is as after `build_sharded_model`.

    Raises:
        UserError: the plan is for another model.
    """
    from weft.planner.parallelize.stage_run import StagedRuntime
    from weft.train.stage_passes import OtherParameters, StagePasses

    found, state = plan_of(config, world.ranks), ModelState(plan, world, local)
    # The number of micro-batches is that of a step, whatever the plan has; here it is one that all schedules support.
    found = replace(found, micro_batches=2 * len(found.stages))
    model = build_stages(plan, world)[0]
    for transform in (freeze, use_state_dtype, use_frozen_dtype):
        model = transform(model, state)
    world.agree(lambda: found.check(model))
    runtime = found.runtime(None, inputs="local", outputs="local")
    model = runtime.apply(model, dtype=plan.dtype)
    setattr(model, ATTRIBUTE, state)
    if isinstance(runtime, StagedRuntime):
        others = OtherParameters(model, runtime)
        state.passes = partial(StagePasses, runtime=runtime, others=others, dtype=plan.state_dtype)
    return cast_outputs(model, state).train()


def _text(model: CustomModelSection) -> str:
    return json.dumps([model.type, dict(model.arguments)], sort_keys=True)


def _model_without_data(text: str) -> nn.Module:
    """Returns the custom model that `_text` stands for, on the meta device."""
    kind, arguments = json.loads(text)
    with torch.device("meta"):
        return load_class(CustomModelSection.model_construct(type=kind), "model")(**arguments)


@cache
def _structure_of(model: str) -> str:
    from weft.planner.parallelize.plan import structure_of

    return structure_of(_model_without_data(model))


@cache
def _searched(model: str, rows: int, length: int, ranks: int, hardware: str) -> Plan:
    """Returns the fastest plan for a model, given as JSON, that gets `rows` sequences in a forward pass."""
    from weft.planner.parallelize.search import search_plan

    made = _model_without_data(model)
    parameters = inspect.signature(made.forward).parameters
    tokens = torch.zeros(rows, length, dtype=torch.int64, device="meta")
    inputs = {next(iter(parameters)): tokens}
    inputs |= {name: tokens for name in ("positions", "labels") if name in parameters}
    try:
        plan, _, _ = search_plan(made, inputs, devices=ranks, hardware=hardware, stages=False)
    except UserError as error:
        raise UserError(f"parallel: auto: {error}") from error
    return plan

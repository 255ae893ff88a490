"""Trains a custom model by a plan of `weft parallelize`: one that a file has, or that `parallel: auto` finds."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.config.components import load_class
from weft.config.derive import batch_sequences, sequence_length, split_batch
from weft.config.mesh import MeshShape, ParallelSection, Schedule
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
from weft.torch_private import tree_leaves

if TYPE_CHECKING:
    from weft.planner.hardware import Hardware
    from weft.planner.parallelize.plan import Plan
    from weft.planner.parallelize.pricing import Split

FILE = "plan.py"  # in the run directory: the plan that `parallel: auto` found
GENERIC = "cpu-generic"


def uses_plan(config: RunConfig) -> bool:
    """Whether a run trains a custom model by a plan."""
    return config.parallel.plan is not None or (config.parallel.auto and is_custom(config.model.type))


def planned_module(config: RunConfig, ranks: int, *, fresh: bool) -> tuple[RunConfig, str]:
    """Returns the config with the mesh of its plan, and a line about the plan. Every rank finds the same.

    With `parallel.auto`, the plan of the last session is kept if it is for this model and as many ranks, and its
    schedule supports the micro-batches of a step.

    Args:
        ranks: world size.
        fresh: whether the run starts over.

    Raises:
        UserError: the plan is for another number of ranks, cannot be read, or none is found.
    """
    section, own = config.parallel, str(config.run_directory / FILE)
    if section.auto and section.plan not in (None, own):
        raise UserError(f"parallel.plan: {section.plan}, but parallel.auto finds a plan; remove one of the two keys")
    changed = section.model_copy(update={"plan": section.plan or own})
    config = config.model_copy(update={"parallel": changed})
    plan = plan_of(config, ranks, fresh=fresh)
    if plan.devices != ranks:
        raise UserError(
            f"parallel.plan: {section.plan} is for {plan.devices} devices ({plan}), and "
            f"the run has {ranks}; start {plan.devices} (--nproc {plan.devices}), or plan for {ranks} devices"
        )
    keys = _keys_of(plan)
    for name, value in keys.items():
        if getattr(section, name) not in (value, ParallelSection.model_fields[name].default):
            raise UserError(f"parallel.{name}: {getattr(section, name)}, but the plan has {value}; remove the key")
    usual = ParallelSection(pp_schedule=keys["pp_schedule"]).virtual_stages
    keys["stages_per_rank"] = keys["stages_per_rank"] if keys["stages_per_rank"] != usual else None
    chosen = config.model_copy(update={"parallel": changed.model_copy(update=keys)})
    seconds = plan.prediction.get("step_seconds")
    cost = f"; {seconds:.3g} s per step predicted" if seconds and section.auto else ""
    mesh = str(plan).replace(" x", ",")
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
        "tp": plan.tp * plan.tp2,
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
    run = _run_of(config, ranks)
    if not fresh and Path(section.plan).is_file():
        kept = read_plan(section.plan)
        same = kept.devices == ranks and kept.structure == _structure_of(run.model)
        if same and run.splits(run.rows, kept.pp, kept.dp, _keys_of(kept)["pp_schedule"]):
            return kept
    return _searched(run)


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


@dataclass(frozen=True)
class _Run:
    """What the plan that `parallel.auto` finds depends on: the steps of a run, as `Steps` describes them.

    Attributes:
        model: the custom model, as JSON.
        sequences, length: number of sequences in the global batch, and of tokens in each.
        micro_batch_size: the configured size.
        dtype: the configured dtype of the computation.
        ranks: world size.
        hardware: name of a hardware file.
        stages: whether plans may have pipeline stages.
    """

    model: str
    sequences: int
    length: int
    micro_batch_size: int | str | None
    dtype: str
    ranks: int
    hardware: str
    stages: bool

    @property
    def rows(self) -> int:
        """The number of sequences in the global batch, padded so that all ranks can share them."""
        return math.ceil(self.sequences / self.ranks) * self.ranks

    @cached_property
    def machine(self) -> Hardware:
        """The hardware file."""
        from weft.planner.hardware import load_hardware

        return load_hardware(self.hardware)

    @property
    def computed(self) -> torch.dtype:
        """The dtype of the computation."""
        from weft.planner.units import compute_dtype

        return getattr(torch, compute_dtype(self.dtype, self.machine))

    @property
    def widening(self) -> float:
        """Bytes of a stored parameter, for each byte in the computation."""
        return torch.promote_types(self.computed, torch.float32).itemsize / self.computed.itemsize

    def splits(self, rows: int, pp: int, dp: int, schedule: Schedule) -> list[Split]:
        """Returns how a step is split on a mesh; nothing if the schedule does not support this."""
        from weft.planner.parallelize.pricing import Split

        section = ParallelSection(pp=pp, pp_schedule=schedule)
        mesh = MeshShape(pp=pp, dp_shard=dp)
        per_rank, micro = split_batch(self.sequences, self.length, mesh, self.micro_batch_size, section)
        count = math.ceil(per_rank / micro)
        if pp == 1:
            return [Split(count, per_rank / count)]
        return [Split(count, micro)] if section.supports(count, pp) else []  # the last one is padded


def _run_of(config: RunConfig, ranks: int) -> _Run:
    model, section = config.model, config.parallel
    assert isinstance(model, CustomModelSection)
    objective = load_class(config.objective, "objective")
    calls = getattr(objective, "compute", None) is not None  # the model itself, which a schedule does
    several = getattr(objective, "sequences_per_sample", 1) != 1  # so micro-batches are counted in samples
    return _Run(
        model=json.dumps([model.type, dict(model.arguments)], sort_keys=True),
        sequences=batch_sequences(config),
        length=sequence_length(config),
        micro_batch_size=config.training.micro_batch_size,
        dtype=config.training.dtype,
        ranks=ranks,
        hardware=section.hardware or this_hardware(),
        stages=not calls and not several,
    )


def _model_without_data(text: str) -> nn.Module:
    """Returns the custom model of `_Run.model`, on the meta device."""
    kind, arguments = json.loads(text)
    with torch.device("meta"):
        return load_class(CustomModelSection.model_construct(type=kind), "model")(**arguments)


def this_hardware() -> str:
    """Returns the name of the hardware file of this machine's devices. Raises UserError if none is known."""
    if not torch.cuda.is_available():
        return GENERIC
    from weft.planner.hardware import hardware_of

    device, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory / 1e9
    found = hardware_of(device, memory)
    if found is None:
        raise UserError(
            f"parallel: auto: no hardware file describes {device}; measure one (weft bench device, weft bench comm), "
            "and name it in parallel.hardware"
        )
    return found


@cache
def _structure_of(model: str) -> str:
    from weft.planner.parallelize.plan import structure_of

    return structure_of(_model_without_data(model))


@cache
def _searched(run: _Run) -> Plan:
    """Returns the plan with the fastest steps."""
    from weft.planner.parallelize.search import search_plan

    made = _model_without_data(run.model)
    parameters = inspect.signature(made.forward).parameters
    tokens = torch.zeros(run.rows, run.length, dtype=torch.int64, device="meta")
    inputs = {next(iter(parameters)): tokens}
    inputs |= {name: tokens for name in ("positions", "labels") if name in parameters}
    try:
        for parameter in made.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(run.computed)
        plan, _, _ = search_plan(
            made, inputs, devices=run.ranks, hardware=run.machine, loss=_loss_of_outputs, steps=run
        )
    except UserError as error:
        raise UserError(f"parallel: auto: {error}") from error
    return replace(plan, loss=None)


def _loss_of_outputs(outputs: Any) -> torch.Tensor:
    """Stands for the objective: costs what a loss of logits `[batch, seq, vocab]` costs, or of values of tokens.

    Args:
        outputs: a tensor, or tensors in dicts and tuples.
    """
    found = [one for one in tree_leaves(outputs) if isinstance(one, torch.Tensor) and one.is_floating_point()]
    if not found:
        raise TypeError("the outputs have no tensor of floating point numbers")
    return reduce(torch.add, map(_loss_of_output, found))


def _loss_of_output(output: torch.Tensor) -> torch.Tensor:
    if output.dim() < 3:
        return output.sum()
    return output.to(torch.promote_types(output.dtype, torch.float32)).log_softmax(-1).sum()

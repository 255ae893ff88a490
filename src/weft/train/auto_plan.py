"""Chooses `parallel: auto`: the fastest plan of a run that fits its ranks, before the process group starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.config.dump import read_saved
from weft.config.legal_mesh import check_mesh
from weft.config.mesh import mesh_shape
from weft.config.run import RunConfig
from weft.errors import UserError
from weft.observe.console import Console
from weft.parallel.ranks import error_on_all_ranks
from weft.train.module_plan import module_facts, plan_of, planned_module, this_hardware, uses_plan


def planned(config: RunConfig, ranks: int, console: Console, *, fresh: bool) -> RunConfig:
    """Returns the config with the keys that the planner chose, if `parallel.auto` is true. Every rank finds the same.

    With `parallel.plan`, the config gets the mesh of this plan. The plan of the last session is kept if it was for as
    many ranks.

    Args:
        ranks: world size.
        fresh: whether the run starts over.

    Raises:
        UserError: no plan fits, the batches are given, the model is of Transformers, or no hardware file is known for
            this GPU.
    """
    if not config.parallel.auto and config.parallel.plan is None:
        return config
    if config.parallel.auto and config.data.train is None:
        raise error_on_all_ranks(
            "parallel: auto plans for the batches of data.train, but the batches are passed to step; set the mesh"
        )
    if uses_plan(config):
        chosen, line = planned_module(config, ranks, fresh=fresh)
        console.line(line)
        return chosen
    if not fresh and (kept := _last(config, ranks)) is not None:
        console.line(f"parallel: {_text(kept, ranks)} (auto; as in the last session)")
        return kept
    from weft.planner.hardware import load_hardware  # not above: every run imports this file, and few are planned
    from weft.planner.search import search

    name = config.parallel.hardware or this_hardware()
    try:
        plan = search(config, ranks, load_hardware(name), limit=1).best[0]
    except UserError as error:
        raise UserError(f"parallel: auto: {error}") from error
    chosen = plan.config
    console.line(
        f"parallel: {_text(chosen, ranks)} (auto; planned for {name}: {plan.prediction.step_seconds:.3g} s per step)"
    )
    return chosen


def planned_facts(config: RunConfig) -> dict[str, str]:
    """Returns name -> text of the plan, which must be equal on all ranks. They can differ if the devices do."""
    if config.parallel.plan is not None:
        return module_facts(config)
    if not config.parallel.auto:
        return {}
    from weft.planner.candidates import PLANNED, PLANNED_TRAINING

    chosen = {f"parallel.{key}": getattr(config.parallel, key) for key in PLANNED}
    chosen |= {f"training.{key}": getattr(config.training, key) for key in PLANNED_TRAINING}
    return {f"{key} (of parallel.auto)": json.dumps(value) for key, value in chosen.items()}


def write_found_plan(config: RunConfig, ranks: int) -> None:
    """Writes the plan that `parallel.auto` found for a custom model to the run directory, if it has another one."""
    if not config.parallel.auto or config.parallel.plan is None:
        return
    from weft.planner.parallelize.read import read_plan

    path, plan = Path(config.parallel.plan), plan_of(config, ranks)
    if not path.is_file() or read_plan(path) != plan:
        plan.write(path)


def _last(config: RunConfig, ranks: int) -> RunConfig | None:
    """Returns the config with the plan of the last session; None if there is none that is legal for these ranks."""
    file = config.run_directory / "config.yaml"
    if not file.is_file():
        return None
    saved: dict[str, Any] = read_saved(file)
    parallel, training = saved.get("parallel") or {}, saved.get("training") or {}
    if not parallel.get("auto"):
        return None
    from weft.planner.candidates import PLANNED, PLANNED_TRAINING, given_keys

    if any((parallel | training).get(key) != value for key, value in given_keys(config).items()):
        return None
    changes = {key: parallel.get(key) for key in PLANNED}  # a saved config has no keys that are null
    kept = config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update=changes),
            "training": config.training.model_copy(update={key: training.get(key) for key in PLANNED_TRAINING}),
        }
    )
    try:
        check_mesh(kept, ranks)
    except UserError:  # another number of ranks, or a changed model or batch
        return None
    return kept


def _text(config: RunConfig, ranks: int) -> str:
    sizes = mesh_shape(config.parallel, ranks).sizes
    axes = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"
    training = config.training
    return f"{axes}; micro_batch_size {training.micro_batch_size}, recomputation {training.activation_checkpointing}"

"""Finds, checks and builds the frozen models of an objective (`Objective.frozen_models`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoint.adapter_record import read_adapter_record
from weft.checkpoint.base_model import load_base, source_digest
from weft.checkpoint.huggingface.transformers_files import fill_transformers_model
from weft.checkpoint.load import architecture, find_checkpoint, load, resolve
from weft.checkpoint.model_parts import without_prediction_layers
from weft.config.legal_mesh import check_mesh
from weft.config.mesh import MeshShape, choose_cp_method
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.config.transformers_model import TransformersModelSection, folder_config
from weft.errors import ConfigError, UserError
from weft.families.config_json import is_huggingface
from weft.models.adapter import saved_with_adapter
from weft.parallel.adapter import subtract_initial_product
from weft.parallel.apply import build_sharded_model
from weft.parallel.frozen_models import AdapterAtStart, FrozenCopy
from weft.parallel.model_state import ModelPlan, ModelState, state_of
from weft.parallel.objective import Objective
from weft.parallel.passes import FrozenModel
from weft.parallel.ranks import error_on_all_ranks
from weft.parallel.world import World
from weft.train.frozen_fit import Source, check_fit
from weft.train.job import Job
from weft.train.module_plan import build_planned_model

START = "start"
PREFIX = "frozen/start/"  # of the names of the adapter's starting values in checkpoints


@dataclass(frozen=True)
class CachedModel:
    """A frozen model whose log-probabilities of documents are computed once and cached.

    Attributes:
        identity: everything on which the log-probabilities depend, except for the documents and the mesh.
        make: function that returns the model, and loads the weights. Every rank must call it.
    """

    identity: list[Any]
    make: Callable[[], FrozenModel]


@dataclass
class FrozenModels:
    """The frozen models of a run.

    Attributes:
        models: name -> model. A model whose results are cached is missing.
        records: name -> path and digest of the model, for checkpoints and the manifest.
        adapter: the starting values of the adapter, if a source is "start" and the run has an adapter.
        cached: name of a field of `Objective.cached_logprobs` -> the model that gives the values of the field.
        prepared: name -> model, if the objective has `cache_prepare`.
    """

    models: dict[str, FrozenModel] = field(default_factory=dict)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    adapter: AdapterAtStart | None = None
    cached: dict[str, CachedModel] = field(default_factory=dict)
    prepared: dict[str, CachedModel] = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns saved name -> tensor to save in a checkpoint, or to fill from one: the adapter's starting values."""
        return {} if self.adapter is None else {f"{PREFIX}{name}": one for name, one in self.adapter.values.items()}

    def empty_tensors(self, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Returns `tensors()`, to fill from a checkpoint with the tensors `saved`.

        Raises:
            UserError: the checkpoint has no starting values.
        """
        found = self.tensors()
        if any(name not in saved for name in found):
            raise error_on_all_ranks(
                "objective: the reference is the adapter at the start of the run, which the checkpoint does not have, "
                "because the run began with another objective; start another run, with adapter.from"
            )
        return found


def check_sources(config: RunConfig, objective: Objective) -> dict[str, Source]:
    """Returns the sources of the objective's frozen models by name. Loads no weights.

    Raises:
        UserError: `frozen_models` is invalid, a source has no model, or does not fit the run (`check_fit`).
    """
    declared = getattr(objective, "frozen_models", None) or {}
    if not isinstance(declared, Mapping) or not all(isinstance(one, str) for one in (*declared, *declared.values())):
        what = 'frozen_models must map names to sources: "start", or the path of a model'
        raise UserError(f"objective: {type(objective).__name__}.{what}")
    found = {name: _find_source(config, name, given) for name, given in declared.items()}
    for source in found.values():
        if not source.start:
            check_fit(config, source)
    return found


def _find_source(config: RunConfig, name: str, given: str) -> Source:
    if given == START:
        section = config.model
        path = section.from_ or (getattr(section, "path", None) if getattr(section, "weights", True) else None)
        key = "model.from" if section.from_ else "model.path" if path else "run.seed"
        return Source(key, section, None if path is None else Path(path), True)
    keys = [key for key, value in config.objective.arguments.items() if value == given]
    key = f"objective.{keys[0]}" if keys else f"objective: frozen_models[{name!r}]"
    try:
        path = find_checkpoint(given)
        record = read_adapter_record(path)
        if is_huggingface(path) and isinstance(config.model, TransformersModelSection):
            content = folder_config(str(path), {}, weights=True)
            section = TransformersModelSection(type="hf", path=str(path), config=content)
        else:
            section = without_prediction_layers(architecture(path))
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    return Source(key, section, Path(given), False, None if record is None else record.section)


def open_frozen(job: Job, objective: Objective, model: nn.Module) -> FrozenModels:
    """Returns the frozen models of a run without their models, which `build_frozen` adds.

    Args:
        model: the sharded trained model.
    """
    declared = getattr(objective, "frozen_models", None) or {}
    shared = job.config.adapter is not None and START in declared.values()
    return FrozenModels(adapter=AdapterAtStart(model) if shared else None)


def build_frozen(
    job: Job, objective: Objective, found: FrozenModels, model: nn.Module, state: Mapping[str, Any]
) -> None:
    """Builds the frozen models of a run, loads their weights, and adds them to `found`. Every rank must call it.

    Args:
        found: result of `open_frozen`.
        model: the sharded trained model, whose weights are loaded.
        state: the state of the checkpoint that was restored; only `step` (0) for a new run.

    Raises:
        UserError: a model does not fit the mesh, or is not the model with which the run started.
    """
    world, trained = job.world, state_of(model)
    assert trained is not None
    if found.adapter is not None and not state["step"]:
        found.adapter.capture()
    for name, source in world.agree(lambda: check_sources(job.config, objective)).items():
        shared = found.adapter if source.start else None
        path, digest = _identify(source, trained, world, shared=shared is not None)
        record = {"path": None if path is None else str(path.absolute()), "digest": digest}
        _raise_if_changed(source, record, state.get("frozen_models", {}).get(name))
        found.records[name] = record
        plan = trained.plan if shared is not None else frozen_plan(job.config, trained.plan, source, world.shape)

        def make(shared=shared, plan=plan, source=source, path=path) -> FrozenModel:
            return shared or FrozenCopy(_load_copy(job, plan, source, path))

        fields = [key for key, model in cached_fields(objective).items() if model == name]
        prepared = bool(getattr(objective, "cache_prepare", None))
        if fields or prepared:
            adapter, start = trained.plan.adapter, []
            if shared is not None and adapter is not None:
                start = [adapter.model_dump(mode="json", exclude={"from_"}), shared.digest()]
            section = source.section.model_dump(mode="json", exclude={"from_", "path", "load_optimizer"})
            identity = [digest, start, section, str(plan.dtype), plan.fp8, str(plan.qat)]
            found.cached |= dict.fromkeys(fields, CachedModel(identity, make))
            found.prepared |= {name: CachedModel(identity, make)} if prepared else {}
        else:
            found.models[name] = make()


def cached_fields(objective: object) -> dict[str, str]:
    """Returns the objective's `cached_logprobs`: name of a field of documents -> name of a frozen model.

    Raises:
        UserError: a value is not a name in `frozen_models`.
    """
    found = dict(getattr(objective, "cached_logprobs", None) or {})
    for key, model in found.items():
        if model not in (getattr(objective, "frozen_models", None) or {}):
            name = type(objective).__name__
            raise UserError(
                f"objective: {name}.cached_logprobs[{key!r}] is {model!r}, which `frozen_models` does not have; add it"
            )
    return found


def _identify(source: Source, trained: ModelState, world: World, *, shared: bool) -> tuple[Path | None, str]:
    """Returns the resolved path of a frozen model (None: initial weights), and its digest.

    Args:
        shared: whether the model is the base model of the trained adapter, of which the digest is known. The starting
            values of the adapter are in each checkpoint.
    """
    if shared:
        assert trained.base is not None
        return trained.base.path, trained.base.digest
    if (given := source.path) is None:
        return None, f"initial weights of seed {trained.plan.seed}"
    path = world.agree(lambda: resolve(given))
    return path, source_digest(source.section, path)


def _raise_if_changed(source: Source, record: Mapping[str, Any], before: Mapping[str, Any] | None) -> None:
    """Raises UserError if a frozen model is not the model that the checkpoint of the run recorded in `before`."""
    if before is None or record["digest"] == before["digest"]:
        return
    old, new = (str(one["digest"]) for one in (before, record))
    remedy = f"set it to {before['path']} as it was then" if before["path"] else f"use the {old}"
    raise error_on_all_ranks(
        f"{source.key}: this is not the frozen model with which the run started (digest {_short(new)}, not "
        f"{_short(old)}); {remedy}, or start another run"
    )


def _short(digest: str) -> str:
    return digest if " " in digest else digest[:12]


def frozen_plans(
    config: RunConfig, plan: ModelPlan, sources: Mapping[str, Source], shape: MeshShape
) -> list[ModelPlan]:
    """Returns the plans of frozen models: `plan` itself for the adapter's starting values, which share the base model.
    Arguments and exceptions are those of `frozen_plan`.
    """
    return [
        plan if source.start and config.adapter is not None else frozen_plan(config, plan, source, shape)
        for source in sources.values()
    ]


def frozen_plan(config: RunConfig, plan: ModelPlan, source: Source, shape: MeshShape) -> ModelPlan:
    """Returns the plan of a frozen model, given the plan of the trained model.

    Raises:
        UserError: the mesh is not legal for the frozen model.
    """
    # Nothing is kept for backward, so gathered parameters are freed after forward.
    changes: dict[str, Any] = {"reshard_after_forward": True, "zero_stage": None, "compress": None}
    if not source.start:
        changes |= {"stage_layers": None, "plan": None} | ({} if getattr(source.section, "moe", None) else {"ep": 1})
    if shape.cp > 1 and isinstance(config.model, ModelSection):  # both models get the same shards of sequences
        changes["cp_method"] = choose_cp_method(config.model, plan.parallel.cp_method, shape.cp, shape.tp)
    parallel = plan.parallel.model_copy(update=changes)
    if not source.start:
        try:
            ranks = shape.pp * shape.data_ranks * shape.cp * shape.tp
            check_mesh(config.model_copy(update={"model": source.section, "parallel": parallel}), ranks)
        except ConfigError as error:
            problem = error.problems[0]
            remedy = "parallel.cp_method: all_gather" if problem.key == "parallel.cp_method" else "another mesh"
            what = f"{source.path} does not fit the mesh: {problem.what.partition(';')[0]}"
            raise error_on_all_ranks(f"{source.key}: {what}; set {remedy}, or give another model") from None
    return replace(
        plan,
        model=source.section,
        parallel=parallel,
        reduce_dtype=None,
        activation_checkpointing="none",
        only_rows_from=None,
        freeze=(),
        fp8=plan.fp8 if source.start else False,
        qat=plan.qat if source.start else None,
        adapter=source.adapter,
        frozen=True,
        projections={},
    )


def _load_copy(job: Job, plan: ModelPlan, source: Source, path: Path | None) -> nn.Module:
    """Builds a frozen model with weights of its own, and loads the weights.

    Args:
        path: a path that `resolve` returned; None: the weights are the initial weights of the run.
    """
    plan, planned = replace(plan, draw=path is None), plan.parallel.plan is not None
    model = build_planned_model(job.config, plan, job.world) if planned else build_sharded_model(plan, job.world)
    if path is None:
        return model
    record = job.world.agree(lambda: read_adapter_record(path))
    if record is not None:
        load_base(model, source.section, job.world.agree(lambda: record.found_base(path)), record)
        load(path, model=model, select=saved_with_adapter(source.section))
        subtract_initial_product(model, record.section)
    elif isinstance(source.section, TransformersModelSection) and is_huggingface(path):
        section = source.section
        job.world.agree(lambda: fill_transformers_model(model, section))
    else:
        load(path, model=model)
    return model

"""Checks whether a mesh is legal for a run. If not, reports all reasons against it, and the nearest legal mesh.

`RunConfig.load` checks the mesh for the world size that its caller or torchrun sets, or else for the smallest world
size that the mesh allows. `check_mesh` repeats the check when the number of processes is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from weft.config.derive import batch_sequences
from weft.config.mesh import (
    AXES,
    ONE_STAGE,
    SPLIT_BACKWARD,
    V_SHAPED,
    MeshShape,
    ParallelSection,
    least_ranks,
    mesh_shape,
)
from weft.config.mesh_needs import GetValue, Needs, Reason
from weft.config.nearest_mesh import as_yaml, nearest_mesh
from weft.config.tree import COMMAND_LINE
from weft.errors import ConfigError, Problem, UserError

if TYPE_CHECKING:
    from weft.config.model import ModelSection
    from weft.config.run import RunConfig

SIZES = (*AXES, "ep")


def check_mesh(config: RunConfig, ranks: int) -> MeshShape:
    """Returns the mesh of a checked config on `ranks` ranks.

    Raises:
        ConfigError: the mesh is not legal. The message lists all reasons, and the nearest legal mesh.
    """
    sequences = None if config.data.train is None else batch_sequences(config)
    reasons = reasons_against(_getter(config), sequences, ranks)
    if reasons:
        raise ConfigError([_placed(config, reason) for reason in reasons])
    return mesh_shape(config.parallel, ranks)


def mesh_needs(config: RunConfig) -> Needs:
    """Returns the rules for the mesh of a checked config."""
    sequences = None if config.data.train is None else batch_sequences(config)
    return Needs(_getter(config), config.parallel, sequences)


def is_legal(config: RunConfig, ranks: int, *, settings: bool = False) -> bool:
    """Whether the mesh of a checked config, and the settings of its axes, are legal on `ranks` ranks.

    Args:
        settings: whether only rules that do not depend on the world size are checked.
    """
    needs = mesh_needs(config)
    if next(_of_settings(needs, config.parallel), None) is not None:
        return False
    return settings or needs.fits(mesh_shape(config.parallel, ranks))


def elastic_mesh(config: RunConfig, ranks: int) -> dict[str, int] | None:
    """Returns the sizes of the mesh that is closest to that of a config, for another number of ranks.

    Only the data axes and `ep` change, and `dp_shard` does not become smaller, because a rank would then need more
    memory. If no such mesh is legal, `dp_shard` can become smaller; and if that is not enough, all axes can change.

    Returns:
        Axis -> size of all axes; None if no mesh with this number of ranks is legal.
    """
    section, needs = config.parallel, mesh_needs(config)
    inner = {axis: getattr(section, axis) for axis in ("pp", "cp", "tp") if getattr(section, axis) != -1}
    for fixed, shards in ((inner, section.dp_shard), (inner, 1), ({}, 1)):

        def allows(axis: str, size: int, fixed: dict[str, int] = fixed, shards: int = shards) -> bool:
            kept = size >= shards if axis == "dp_shard" else fixed.get(axis, size) == size
            return kept and needs.allows(axis, size)

        found = nearest_mesh(section, ranks, needs.experts, allows, needs.fits)
        if found is not None:
            return {axis: found.get(axis, 1) for axis in SIZES}
    return None


def sequence_unit(config: RunConfig, shape: MeshShape) -> int:
    """Returns the number of which the length of every sequence must be a multiple, for `cp` and `tp`."""
    return Needs(_getter(config), config.parallel, None).sequence_unit(shape)


def check_tensor_parallel(model: ModelSection, tp: int) -> None:
    """Raises UserError if a built-in decoder cannot be sharded over `tp` tensor parallel ranks."""

    def get(key: str) -> Any:
        section, *names = key.split(".")
        found: Any = model if section == "model" else None
        for name in names:
            found = getattr(found, name, None)
        return found

    reasons = list(Needs(get, ParallelSection(tp=tp), None).of_axes(MeshShape(tp=tp)))
    if reasons:
        found = " and ".join(reason.what.partition(";")[0] for reason in reasons)
        raise UserError(f"tensor parallelism over {tp} ranks: {found}; choose another number of ranks")


def _getter(config: RunConfig) -> GetValue:
    """Returns a function that returns a value of a config by its dotted key; None if the config has no such key."""

    def get(key: str) -> Any:
        found: Any = config
        for name in key.split("."):
            found = getattr(found, name, None)
        return found

    return get


def _placed(config: RunConfig, reason: Reason) -> Problem:
    """Converts a reason to a problem, which has a file and a line.

    The line is the one that sets the reason's key. If no line sets this key, it is a line that sets a mesh axis.
    """
    axes = [f"parallel.{axis}" for axis in SIZES]
    for key in [*axes, reason.key] if reason.key == "parallel" else [reason.key, *axes]:
        file, _, line = config.origins.get(key, "").rpartition(":")
        if file and line.isdigit():
            return Problem(reason.key, reason.what, file, int(line))
        if line == COMMAND_LINE:
            return Problem(reason.key, reason.what, COMMAND_LINE)
    return Problem(reason.key, reason.what)


def reasons_against(get: GetValue, sequences: int | None, ranks: int | None) -> list[Reason]:
    """Returns all reasons against the mesh of a run.

    Args:
        get: returns a checked value by its dotted key. The values of `parallel` must have valid types and bounds.
        sequences: number of sequences in the global batch; None if it is not known.
        ranks: the world size. None: the smallest world size on which the mesh is possible.
    """
    values = {name: get(f"parallel.{name}") for name in ParallelSection.model_fields}
    section = ParallelSection.model_construct(**values)
    needs = Needs(get, section, sequences)
    against: list[Reason] = []
    try:
        least = least_ranks(section)
        # Without a world size, an axis of -1 may have any size; some rules need more than 1.
        tried = [ranks] if ranks is not None else [least, 2 * least] if -1 in values.values() else [least]
        found = [list(needs.reasons(mesh_shape(section, number))) for number in tried]
        against = min(found, key=len)
    except UserError as error:
        key, _, what = error.what.partition(": ")
        written = MeshShape(**{axis: max(1, values[axis]) for axis in SIZES})
        against = [Reason(key, what), *needs.of_axes(written)]
    reasons = list(_of_settings(needs, section))
    if against:
        nearest = nearest_mesh(section, ranks, needs.experts, needs.allows, needs.fits)
        remedy = (
            "no mesh with this number of ranks is legal"
            if nearest is None
            else f"nearest legal: parallel: {as_yaml(nearest)}"
        )
        last = against.pop()
        reasons += [*against, Reason(last.key, f"{last.what}; {remedy}")]
    return reasons


def _of_settings(needs: Needs, section: ParallelSection) -> Iterator[Reason]:
    """Yields the errors in the section `parallel` that can be found without the world size."""
    stage, reshards = section.zero_stage, section.reshard_after_forward
    if stage is not None and reshards is not None and bool(reshards) != (stage == 3):
        what = f"{str(reshards).lower()}, but zero_stage {stage} sets {str(stage == 3).lower()}; remove one of the keys"
        yield Reason("parallel.reshard_after_forward", what)
    when = "last" if stage == 1 else "every"
    if stage is not None and section.reduce_gradients not in (None, when):
        what = f"{section.reduce_gradients}, but zero_stage {stage} sets {when}; remove one of the keys"
        yield Reason("parallel.reduce_gradients", what)
    if reshards is not None and not isinstance(reshards, bool) and reshards < 1:
        yield Reason(
            "parallel.reshard_after_forward",
            f"{reshards} is not a number of ranks; set true, false or a number of at least 1",
        )
    several, counts = section.stages_per_rank, section.stage_layers
    if section.pp == 1:
        for key, value in (("stage_layers", counts), ("stages_per_rank", several)):
            if value is not None:
                yield Reason(f"parallel.{key}", f"{value}, but there is no pipeline (parallel.pp is 1); remove the key")
    elif several not in (None, 2) and section.pp_schedule in V_SHAPED:
        what = f"{several}, but {section.pp_schedule} has 2 stages per rank (one from each end); remove the key"
        yield Reason("parallel.stages_per_rank", what)
    elif several not in (None, 1) and section.pp_schedule in ONE_STAGE:
        what = f"{several}, but {section.pp_schedule} has 1 stage per rank; remove the key, or set pp_schedule"
        yield Reason("parallel.stages_per_rank", f"{what}: interleaved_1f1b")
    if counts is not None and min(counts, default=0) < 1:
        yield Reason("parallel.stage_layers", f"{counts}: a stage has no layer; set at least 1 layer for each stage")
    elif counts is not None and needs.layers is not None and sum(counts) != needs.layers:
        what = f"{sum(counts)} layers in total, but the model has {needs.layers} (model.num_hidden_layers)"
        yield Reason("parallel.stage_layers", f"{what}; set numbers with this sum")
    if section.tp == 1 and section.async_tp:
        yield Reason("parallel.async_tp", "there is no tensor parallelism (parallel.tp is 1); remove the key")
    if section.pp != 1 and section.pp_schedule in SPLIT_BACKWARD and needs.ahead:
        what = f"{section.pp_schedule} splits each backward in two, which PyTorch cannot do with the shared head and"
        remedy = "set parallel.pp_schedule: interleaved_1f1b"
        yield Reason(
            "parallel.pp_schedule",
            f"{what} embedding of multi-token prediction (model.num_nextn_predict_layers); {remedy}",
        )
    if section.pp != 1 and section.pp_schedule in SPLIT_BACKWARD and needs.compiles:
        what = (
            f"{section.pp_schedule} splits each backward in two, which compiled code does not support; set it to false"
        )
        yield Reason("training.compile", f"{what}, or parallel.pp_schedule: interleaved_1f1b")

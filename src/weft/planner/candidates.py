"""Enumerates the plans of a search: meshes, micro-batches, recomputation, schedules and sharding.

A plan is a checked config with other keys of `parallel` and `training`. The global batch, the optimizer and every other
key that changes the result of the run stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from weft.config.derive import batch_sequences, sequence_length
from weft.config.legal_mesh import is_legal, mesh_needs
from weft.config.mesh import AXES, MeshShape, ParallelSection, Schedule, choose_cp_method
from weft.config.model import ModelSection
from weft.config.nearest_mesh import divisors
from weft.config.run import RunConfig
from weft.planner.hardware import Hardware
from weft.planner.work import allows_ring

MOST_MICRO = 64  # sequences of a micro-batch; larger products are not faster
SCHEDULES: tuple[tuple[Schedule, int], ...] = (  # gpipe and looped_bfs need more memory and are not faster
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("interleaved_zero_bubble", 2),
    ("zbv_zero_bubble", 2),
    ("dualpipev", 2),
)
# Keys of `parallel` that a plan sets; others, such as `compress`, stay as in the file.
PLANNED = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero_stage", "reshard_after_forward")
PLANNED += ("reduce_gradients", "offload", "async_tp", "cp_method", "pp_schedule", "stages_per_rank", "stage_layers")
PLANNED_TRAINING = ("micro_batch_size", "activation_checkpointing")  # such keys of `training`


@dataclass(frozen=True, eq=False)  # compared by identity, which is fast: `MeshSpace` creates each work once
class Work:
    """What determines the computation of a micro-batch on a rank.

    Attributes:
        tp, cp, ep: sizes of these axes.
        micro: number of sequences of a micro-batch.
        checkpointing: value of `training.activation_checkpointing`.
        method: value of `parallel.cp_method`.
    """

    tp: int
    cp: int
    ep: int
    micro: int
    checkpointing: str
    method: str


@dataclass(frozen=True)
class Layout:
    """A micro-batch on a rank, with the number of pipeline and data ranks.

    Attributes:
        work: the micro-batch.
        pp: number of pipeline ranks.
        data: number of data parallel ranks, replicas and shards.
        count: number of micro-batches of a step.
    """

    work: Work
    pp: int
    data: int
    count: int


@dataclass(frozen=True)
class Candidate:
    """A complete plan.

    Attributes:
        layout: the micro-batch and the numbers of ranks.
        shard: value of `parallel.dp_shard`.
        schedule: value of `parallel.pp_schedule`.
        virtual: number of pipeline stages on each rank.
        reshard: value of `parallel.reshard_after_forward`; None if it has no effect.
        every: whether gradients are reduced with every micro-batch.
        offload: value of `parallel.offload`.
    """

    layout: Layout
    shard: int
    schedule: Schedule
    virtual: int
    reshard: bool | int | None
    every: bool
    offload: str

    @property
    def key(self) -> tuple[int, ...]:
        """The sizes of pp, data ranks, dp_shard, cp, tp and ep."""
        work = self.layout.work
        return self.layout.pp, self.layout.data, self.shard, work.cp, work.tp, work.ep

    @property
    def mesh(self) -> MeshShape:
        """The mesh."""
        work, data = self.layout.work, self.layout.data
        return MeshShape(self.layout.pp, data // self.shard, self.shard, work.cp, work.tp, work.ep)


class MeshSpace:
    """All plans of a run on a number of devices.

    Args:
        config: a checked config of a built-in decoder. With `parallel.auto`, plans keep its other keys.
        devices: number of ranks.
        hardware: the hardware file; `tp` and `cp` stay within a node of it.
        within: False: `tp` and `cp` may exceed a node.
    """

    def __init__(self, config: RunConfig, devices: int, hardware: Hardware, *, within: bool = True):
        assert isinstance(config.model, ModelSection)
        self.config, self.model, self.devices = without_plan(config), config.model, devices
        self.given = given_keys(config)
        self.inner = min(devices, hardware.node) if within else devices
        self.node = hardware.node
        self.sequences, self.length = batch_sequences(config), sequence_length(config)
        schedules = [one for one in SCHEDULES if self.allows(pp_schedule=one[0], stages_per_rank=one[1])]
        self.schedules = [one for one in schedules if self._runs(one[0])]
        self.sections = {one: ParallelSection(pp_schedule=one[0], stages_per_rank=one[1]) for one in SCHEDULES}
        self.work = cache(Work)
        self.recomputations = ["none", "selective", "full"]
        if (given := config.training.activation_checkpointing) not in self.recomputations:
            self.recomputations.append(given)
        self.recomputations = [one for one in self.recomputations if self.allows(activation_checkpointing=one)]

    def allows(self, **values: Any) -> bool:
        """Whether the keys that the config gives beside `parallel.auto` have these values."""
        return all(self.given.get(key, value) == value for key, value in values.items())

    def layouts(self) -> Iterator[Layout]:
        """Yields what is possible of meshes without their data axes, micro-batches and recomputation."""
        needs, model = mesh_needs(self.config), self.model
        ones = [size for size in divisors(self.devices) if size <= self.inner]
        tps, cps = ([one for one in ones if needs.allows(axis, one)] for axis in ("tp", "cp"))
        pps = [one for one in divisors(self.devices) if one <= model.num_hidden_layers and needs.allows("pp", one)]
        experts = divisors(model.moe.num_experts) if model.moe is not None else [1]
        for tp, cp in ((tp, cp) for tp in tps for cp in cps if tp * cp <= self.inner and self.allows(tp=tp, cp=cp)):
            if next(needs.of_axes(MeshShape(tp=tp, cp=cp)), None) is not None:
                continue
            for pp in (one for one in pps if self.devices % (one * tp * cp) == 0 and self.allows(pp=one)):
                data = self.devices // (pp * tp * cp)
                if data > self.sequences:
                    continue  # ranks without a sequence
                for ep in (one for one in experts if data * cp % one == 0 and needs.allows("ep", one)):
                    if not self.allows(ep=ep):
                        continue
                    yield from self._micro_batches(tp, cp, ep, pp, data)

    def _micro_batches(self, tp: int, cp: int, ep: int, pp: int, data: int) -> Iterator[Layout]:
        per_rank, given = math.ceil(self.sequences / data), self.config.training.micro_batch_size
        sizes = {size for size in divisors(per_rank) if size <= MOST_MICRO}
        if isinstance(given, int) and given <= per_rank:
            sizes.add(given)
        for micro in sorted(size for size in sizes if self.allows(micro_batch_size=size)):
            for checkpointing in self.recomputations:
                for method in self._methods(tp, cp):
                    work = self.work(tp, cp, ep, micro, checkpointing, method)
                    yield Layout(work, pp, data, math.ceil(per_rank / micro))

    def _methods(self, tp: int, cp: int) -> list[str]:
        model, plain = self.model, self.config.data.document_attention is False
        if cp == 1:
            return ["auto"]
        plain = plain and allows_ring(model) and not any(map(model.slides, range(model.num_hidden_layers)))
        ring = plain and self.length % (2 * cp * tp) == 0
        return ["auto", "ring"] if ring else ["auto"]

    def exchanges(self, work: Work) -> bool:
        """Whether attention exchanges heads for tokens over `cp`."""
        return choose_cp_method(self.model, work.method, work.cp, work.tp) == "all_to_all"

    def _runs(self, schedule: Schedule) -> bool:
        changes = {"pp": 2, "dp_shard": 1, "pp_schedule": schedule, "async_tp": False, "compress": None}
        parallel = self.config.parallel.model_copy(update=changes)
        return is_legal(self.config.model_copy(update={"parallel": parallel}), 2, settings=True)

    def possible(self) -> bool:
        """Whether there is any candidate."""
        found = ((layout, *schedule) for layout in self.layouts() for schedule in self.schedules_of(layout))
        return any(True for one in found for _ in self.variants(*one))

    def schedules_of(self, layout: Layout) -> list[tuple[Schedule, int]]:
        """Returns the pipeline schedules that a layout can have, with the number of stages on each rank."""
        if layout.pp == 1:
            return [("1f1b", 1)]
        return [one for one in self.schedules if self._fits(layout, *one)]

    def variants(self, layout: Layout, schedule: Schedule, virtual: int) -> Iterator[Candidate]:
        """Yields the candidates of a layout and a schedule: data axes, resharding, reduction and offloading."""
        compresses = self.config.parallel.compress is not None
        for shard in reversed(divisors(layout.data)):
            fsdp = shard * layout.work.cp
            if fsdp % layout.work.ep or (compresses and shard == layout.data):
                continue
            if not self.allows(dp_shard=shard, dp_replicate=layout.data // shard):
                continue
            reduces = fsdp * (layout.data // shard) > 1 and layout.count > 1 and layout.pp == 1
            for reshard in self._resharding(layout, fsdp):
                for every in self._reductions() if reduces else (False,):
                    for offload in (one for one in ("parameters", "optimizer", "none") if self.allows(offload=one)):
                        yield Candidate(layout, shard, schedule, virtual, reshard, every, offload)

    def _reductions(self) -> tuple[bool, ...]:
        """Returns whether gradients may be reduced with every micro-batch."""
        given = self.given.get("reduce_gradients")
        return (True, False) if given is None else (given == "every",)

    def _fits(self, layout: Layout, schedule: Schedule, virtual: int) -> bool:
        if layout.pp * virtual > self.model.num_hidden_layers:
            return False
        return self.sections[schedule, virtual].supports(layout.count, layout.pp)

    def _resharding(self, layout: Layout, fsdp: int) -> list[bool | int | None]:
        if fsdp == 1:
            return [None]
        if "reshard_after_forward" in self.given:
            reshard = self.given["reshard_after_forward"]
            return [None if reshard is (layout.pp == 1) else reshard]  # None: the default
        if layout.pp > 1:
            return [True, None]
        apart = fsdp // layout.work.ep
        within = layout.work.tp == 1 and self.node < fsdp and fsdp % self.node == 0
        within = within and (layout.work.ep == 1 or apart in (1, self.node))
        return [None, False, self.node] if within else [None, False]

    def config_of(self, candidate: Candidate, stage_layers: list[int] | None = None) -> RunConfig:
        """Returns the config of a candidate.

        Args:
            stage_layers: number of layers of each pipeline stage; None: `parallel.stage_layers` is not set.
        """
        layout, mesh = candidate.layout, candidate.mesh
        usual = ParallelSection(pp_schedule=candidate.schedule).virtual_stages
        chosen = layout.pp == 1 and layout.count > 1 and mesh.fsdp > 1  # else a run has no choice
        reduction = "every" if candidate.every else "last" if chosen else None
        changes: dict[str, Any] = {
            **mesh.sizes,
            "reshard_after_forward": candidate.reshard,
            "reduce_gradients": reduction,
            "offload": candidate.offload,
            "async_tp": self.config.parallel.async_tp and mesh.tp > 1,
            "cp_method": layout.work.method,
            "pp_schedule": candidate.schedule,
            "stages_per_rank": candidate.virtual if candidate.virtual != usual else None,
            "stage_layers": stage_layers,
        }
        changes |= {key: self.given[key] for key in ("cp_method", "stage_layers") if key in self.given}
        parallel = self.config.parallel.model_copy(update=changes)
        training = self.config.training.model_copy(
            update={"micro_batch_size": layout.work.micro, "activation_checkpointing": layout.work.checkpointing}
        )
        return self.config.model_copy(update={"parallel": parallel, "training": training})


def given_keys(config: RunConfig) -> dict[str, Any]:
    """Returns the keys of `PLANNED`, micro-batch and recomputation that a config gives beside `parallel.auto`.

    Plans keep them. A config that gives all axes is that of a planned run, as the run directory has it: its keys are
    those of the last plan, so none is returned.
    """
    set_ = {key for key, origin in config.origins.items() if origin != "default"}
    if not config.parallel.auto or {f"parallel.{axis}" for axis in AXES} <= set_:
        return {}
    found = {key: getattr(config.parallel, key) for key in PLANNED if f"parallel.{key}" in set_}
    found |= {key: getattr(config.training, key) for key in PLANNED_TRAINING if f"training.{key}" in set_}
    if (stage := found.pop("zero_stage", None)) is not None:
        found |= {"reshard_after_forward": stage == 3, "reduce_gradients": "last" if stage == 1 else "every"}
    return {key: value for key, value in found.items() if value not in (None, -1, "auto")}


def without_plan(config: RunConfig) -> RunConfig:
    """Returns a config whose keys in `PLANNED` have their defaults, except `async_tp`."""
    defaults = {name: ParallelSection.model_fields[name].default for name in PLANNED if name != "async_tp"}
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=defaults)})

"""Lower bounds of the time and the memory of plans, which cost microseconds where a prediction costs milliseconds.

A bound never exceeds what `weft.planner.step.predict` and `weft.planner.memory.memory_of` compute, so that a search
that skips plans by their bounds finds the same plans as one that predicts all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from itertools import accumulate
from operator import mul

from weft.config.mesh import SPLIT_BACKWARD, V_SHAPED, MeshShape, Schedule
from weft.config.run import RunConfig
from weft.parallel.stages import balance_layers, embeds_at_end, stages_of_rank
from weft.planner.candidates import Candidate, Layout, MeshSpace, Work
from weft.planner.communication import Links, mesh_groups
from weft.planner.hardware import Hardware
from weft.planner.memory import DEVICE_BYTES, FRAGMENTATION, STATES
from weft.planner.micro_batch import Kind, Pieces, Size, Times, seconds_of
from weft.planner.schedules import in_flight
from weft.planner.step import CLIP_ELEMENTS, MUON_FLOPS, UPDATE_ELEMENTS
from weft.planner.tensors import Sizes, saved_tensors
from weft.planner.units import Job
from weft.planner.work import block_kinds, block_work, embedding_work, head_work


class Bounds:
    """Lower bounds for the candidates of a space.

    Args:
        space: the candidates.
        hardware: the hardware file.
        cpu: whether the device is a CPU.
    """

    def __init__(self, space: MeshSpace, hardware: Hardware, *, cpu: bool = False):
        self.space, self.hardware, self.cpu, self.links = space, hardware, cpu, Links(hardware)
        config = space.config
        nodes = -(-space.devices // hardware.node)
        self.stragglers = 1 + hardware.jitter * math.sqrt(2 * math.log(nodes))
        self.host = hardware.host.to_device_gb_s * 1e9
        self.elements = UPDATE_ELEMENTS + (CLIP_ELEMENTS if config.training.grad_clip is not None else 0)
        self.states = STATES.get(config.optimizer.type, 2)
        self.pieces = cache(self._pieces)
        self.split = cache(self._split)
        self.stage_times = cache(self._stage_times)
        self.pipeline = cache(self._pipeline)
        self.activations = cache(self._activations)
        self.over_fsdp = cache(self._over_fsdp)

    # ---- what a micro-batch costs

    def _pieces(self, work: Work) -> Pieces:
        job = Job(self._small(work), work.tp * work.cp * work.ep, self.hardware)
        layers = job.model.num_hidden_layers
        kinds: list[Kind] = [(*kind, at >= layers) for at, kind in enumerate(block_kinds(job.model))]
        at = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
        works = {kind: block_work(job.shares, layer) for kind, layer in at.items()}
        sizes = Sizes(job.shares, job.state, self.cpu, work.method, work.checkpointing)
        saved, extra = {}, []
        for kind, layer in at.items():
            kept = saved_tensors(sizes, layer)
            more = {"none": kept.everything, "selective": kept.inputs + kept.selective}
            saved[kind] = more.get(work.checkpointing, kept.inputs)
            extra.append(max(0.0, kept.everything - max(saved[kind], kept.inputs)) + kept.transient)
        ends = [work(job.shares, job.vocabulary).parameters for work in (embedding_work, head_work)]
        separate = ends[1] * (not embeds_at_end(job.model))
        stage = job.stage([], begins=True, ends=True)
        assert stage.first is not None
        assert stage.last is not None
        return Pieces(
            job,
            {kind: job.block(layer) for kind, layer in at.items()},
            {kind: Size(one.parameters, one.expert_parameters) for kind, one in works.items()},
            kinds,
            (stage.first, stage.last),
            Size(sum(ends) - separate, 0),
            Size(separate, 0),
            saved,
            min(extra) if work.checkpointing in (*more, "full") else 0.0,
        )

    def _small(self, work: Work) -> RunConfig:
        """Returns a config with the fewest ranks on which a micro-batch is possible."""
        layout = Layout(work, 1, work.ep, 1)
        return self.space.config_of(Candidate(layout, work.ep, "1f1b", 1, None, False, "none"))

    def _split(self, work: Work, stages: int) -> list[int]:
        """Returns the number of layers of each stage that makes the slowest stage fastest."""
        pieces = self.pieces(work)
        layers = pieces.job.model.num_hidden_layers
        costs = [sum(seconds_of(pieces.units[kind])[:2]) for kind in pieces.kinds]
        first, last = (sum(seconds_of(end)[:2]) for end in pieces.ends)
        return balance_layers(costs[:layers], stages, last + sum(costs[layers:]), first)

    def stage_layers(self, candidate: Candidate) -> list[int] | None:
        """Returns the number of layers of each pipeline stage; None without a pipeline."""
        layout = candidate.layout
        return self.split(layout.work, layout.pp * candidate.virtual) if layout.pp > 1 else None

    # ---- time

    def layout_seconds(self, layout: Layout) -> float:
        """Returns a lower bound of the seconds of a step for every candidate of a layout."""
        pieces = self.pieces(layout.work)
        forward, backward, _ = pieces.passes
        update = min(self._update(layout, offload) for offload in ("none", "optimizer", "parameters"))
        return (layout.count * (forward + backward) / layout.pp + update) * self.stragglers

    def seconds(self, candidate: Candidate) -> float:
        """Returns a lower bound of the seconds of a step."""
        layout = candidate.layout
        if layout.pp == 1:
            passes = self._one_stage(candidate)
        else:
            passes = self.pipeline(layout.work, layout.count, layout.pp, candidate.schedule, candidate.virtual)
        return (passes + self._update(layout, candidate.offload, candidate.shard)) * self.stragglers

    def _update(self, layout: Layout, offload: str, shard: int | None = None) -> float:
        """Returns a lower bound of the seconds of the optimizer's update."""
        pieces = self.pieces(layout.work)
        if not pieces.job.trained:
            return 0.0
        local = self._local(layout, shard or layout.data)
        size = local * self.elements * pieces.job.state
        if offload == "parameters":
            seconds = size * self.hardware.node / self.host
        else:
            seconds = pieces.job.costs.moved(size) + (4 * local * pieces.job.state / self.host) * (offload != "none")
        if self.space.config.optimizer.type == "muon":
            seconds += local * MUON_FLOPS * pieces.job.model.hidden_size / pieces.job.costs.rates[pieces.job.dtype]
        return seconds

    def _local(self, layout: Layout, shard: int) -> float:
        """Returns the mean number of parameters of a rank."""
        pieces, fsdp = self.pieces(layout.work), shard * layout.work.cp
        others, experts = pieces.root.others + pieces.head.others + pieces.blocks.others, pieces.blocks.experts
        return (others / fsdp + experts / max(1, fsdp // layout.work.ep)) / layout.pp

    def _over_fsdp(self, kind, size: Size, width: int, work: Work, shard: int, *, offload: bool) -> float:
        groups = mesh_groups(MeshShape(dp_shard=shard, cp=work.cp, tp=work.tp, ep=work.ep))
        seconds = self.links.seconds(kind, size.others * width, groups["fsdp"])
        if offload:
            seconds += size.others * 4 / groups["fsdp"].ranks / self.host
        return seconds + self.links.seconds(kind, size.experts * width, groups["efsdp"])

    def _collectives(self, candidate: Candidate, size: Size) -> tuple[float, float, float]:
        """Returns the seconds of an all-gather, of a reduction, and around both, for a piece."""
        work, shard, offload = candidate.layout.work, candidate.shard, candidate.offload == "parameters"
        job, fsdp = self.pieces(work).job, shard * work.cp
        gather = self.over_fsdp("all_gather", size, job.gathered_width, work, shard, offload=offload)
        reduce = self.over_fsdp("reduce_scatter", size, job.reduce_width, work, shard, offload=offload) * job.trained
        copied = size.others * (fsdp > 1) + size.experts * (fsdp > work.ep)
        host = job.host.fsdp_us * 1e-6 / job.parallel.layers_per_fsdp_unit if copied else 0.0
        return gather, reduce, job.copied(copied) + host

    def _one_stage(self, candidate: Candidate) -> float:
        layout = candidate.layout
        pieces, slow = self.pieces(layout.work), self.hardware.overlap.slowdown
        reshards = candidate.reshard is None or bool(candidate.reshard)
        forward, backward, waited = pieces.passes
        gathered, reduced, head_copied = self._collectives(candidate, pieces.head)
        again = copied = 0.0
        for kind, number in pieces.counts.items():
            gather, reduce, copy = self._collectives(candidate, pieces.sizes[kind])
            gathered, reduced, copied = gathered + number * gather, reduced + number * reduce, copied + number * copy
            again += number * (0.0 if type(candidate.reshard) is int else gather) * (1 - 1 / len(pieces.kinds))
        root = self._collectives(candidate, pieces.root)
        count, reductions = layout.count, layout.count if candidate.every else 1
        gathers = count if reshards else 1
        keep = 1 - 1 / len(pieces.kinds)  # the last unit is not gathered again
        copies = copied * (gathers + reshards * keep * count + reductions) + root[2] * (1 + reductions)
        copies += head_copied * (gathers + reductions)
        beside = gathered * gathers + again * reshards * count + reduced * reductions
        compute = (forward + backward) * count + copies
        hidden = max(0.0, beside - waited * count - copies) * slow / (1 + slow)
        hidden = min(hidden, slow * (forward + backward) * count)
        phases = max(forward, gathered) * gathers + forward * (count - gathers)
        phases += max(backward, again * reshards) * count
        return max(compute + hidden, beside, phases + copies) + root[0] + root[1]

    def tight_seconds(self, candidate: Candidate) -> float:
        """Returns a tighter lower bound of the seconds of a step with a pipeline, with FSDP2's collectives."""
        layout, reshards = candidate.layout, bool(candidate.reshard)
        pieces, stages = self.pieces(layout.work), self.stage_times(layout.work, layout.pp * candidate.virtual)
        costs = {kind: self._collectives(candidate, size) for kind, size in pieces.sizes.items()}
        times, gathers, tails = [], [], []
        for forward, backward, weights, counts in stages:
            gather, reduce, copy = (sum(costs[kind][place] * n for kind, n in counts.items()) for place in range(3))
            gathers.append(gather)
            tails.append(reduce + copy)
            if reshards:  # the last unit is not gathered again
                again = gather - max(costs[kind][0] for kind in counts)
                copied = copy - max(costs[kind][2] for kind in counts)
                times.append((max(forward + copy, gather), max(backward + copied, again), weights, counts))
            else:
                times.append((forward, backward, weights, counts))
        passes = self._passes(candidate.schedule, layout.count, layout.pp, times, tails)
        for rank in range(layout.pp):
            own = stages_of_rank(self.space.sections[candidate.schedule, candidate.virtual], rank, layout.pp)
            forward = sum(times[stage][0] for stage in own)
            # No reduction begins before all passes of a stage, which need the forward passes of the rank's others.
            passes = max(passes, layout.count * (forward + times[own[-1]][1]) + sum(tails[stage] for stage in own))
            if not reshards:  # the last stage waits for all gathers
                work = (layout.count - 1) * times[own[-1]][0] + layout.count * times[own[-1]][1]
                passes = max(passes, sum(gathers[stage] for stage in own) + work)
        return (passes + self._update(layout, candidate.offload, candidate.shard)) * self.stragglers

    def _pipeline(self, work: Work, micro_batches: int, pp: int, schedule: Schedule, virtual: int) -> float:
        times = self.stage_times(work, pp * virtual)
        return self._passes(schedule, micro_batches, pp, times, [0.0] * len(times))

    def _passes(self, schedule: Schedule, micro_batches: int, pp: int, stages: list[Times], tails: list[float]):
        """Returns a lower bound of the seconds of all passes: those of a rank, and the first and last of others.

        Args:
            stages: seconds of the passes of each stage for one micro-batch.
            tails: seconds of each stage's reduction of gradients, which follows its last backward pass.
        """
        longest = before = after = 0.0
        splits = schedule in SPLIT_BACKWARD
        for rank in range(pp):
            own = [rank, 2 * pp - 1 - rank] if schedule in V_SHAPED else range(rank, len(stages), pp)
            busy = micro_batches * sum(stages[number][0] + stages[number][1] for number in own)
            # After its last backward pass, other ranks still compute theirs. Gradients of weights can be computed then.
            filling = micro_batches * sum(stages[number][2] for number in own) if splits else tails[rank]
            ends = busy + max(0.0, after - filling) if splits else busy + max(after, filling)
            longest = max(longest, before + ends)
            forward, backward, weights, _ = stages[rank]
            before, after = before + forward, after + backward - (weights if splits else 0.0)
        return longest

    def _stage_times(self, work: Work, stages: int) -> list[Times]:
        """Returns the seconds of the passes of each stage for one micro-batch, and its layers by kind."""
        pieces, counts, at, found = self.pieces(work), self.split(work, stages), 0, []
        seconds = {kind: seconds_of(unit) for kind, unit in pieces.units.items()}
        for number, layers in enumerate(counts):
            last = number == len(counts) - 1
            ends = [seconds_of(pieces.ends[0])] * (number == 0) + [seconds_of(pieces.ends[1])] * last
            kinds = Counter(pieces.kinds[at:] if last else pieces.kinds[at : at + layers])
            total = [sum(end[place] for end in ends) for place in range(3)]
            for kind, size in kinds.items():
                total = [before + size * one for before, one in zip(total, seconds[kind], strict=True)]
            found.append((*total, kinds))
            at += layers
        return found

    # ---- memory

    def _activations(
        self, work: Work, micro_batches: int, pp: int, schedule: Schedule, virtual: int
    ) -> tuple[float, float]:
        """Returns the bytes that the first pipeline rank keeps for backward, which has most micro-batches in flight.

        Returns:
            The bytes in all backward passes, and in those that follow the first of their stage.
        """
        pieces = self.pieces(work)
        if pp == 1:
            return pieces.all_saved, pieces.all_saved
        ends = [0, *accumulate(self.split(work, pp * virtual))]
        saved = [0.0, *accumulate(pieces.saved[kind] for kind in pieces.kinds)]
        count = min(micro_batches, 4 * pp * virtual)  # later micro-batches repeat the earlier ones
        stages = stages_of_rank(self.space.sections[schedule, virtual], 0, pp)
        job = pieces.job
        residual = job.shares.tokens / job.mesh.tp * job.model.hidden_size * job.state  # received, and sent on
        sizes = [
            saved[ends[stage + 1]] - saved[ends[stage]] + residual * ((stage > 0) + (stage < pp * virtual - 1))
            for stage in stages
        ]
        found = [(sum(map(mul, state, sizes)), state[-1]) for state in in_flight(schedule, 0, pp, virtual, count)]
        return max(size for size, _ in found), max((size for size, first in found if not first), default=0.0)

    def kept(self, candidate: Candidate) -> tuple[float, float]:
        """Returns lower bounds of the bytes of activations at the peak, which the data axes do not change.

        Returns:
            The bound, and that of backward passes that follow the first of their stage.
        """
        layout = candidate.layout
        kept, later = self.activations(layout.work, layout.count, layout.pp, candidate.schedule, candidate.virtual)
        extra = self.pieces(layout.work).extra
        return kept + extra, later + extra * (later > 0)

    def memory(self, candidate: Candidate) -> float:
        """Returns a lower bound of the bytes of the rank that needs most memory."""
        layout = candidate.layout
        pieces = self.pieces(layout.work)
        job, local = pieces.job, self._local(layout, candidate.shard)
        params = (pieces.blocks.others + pieces.blocks.experts) / layout.pp
        on_device = candidate.offload != "parameters"
        static = local * job.state * (on_device + self.states * (candidate.offload == "none"))
        alone = self.space.devices == 1
        stays = candidate.reshard is False or (layout.pp > 1 and candidate.reshard is None) or alone
        waiting = params * job.reduce_width * (layout.count > 1 and not candidate.every)
        gathered = params * stays * (0 if alone and job.width == job.state else job.width)
        kept, later = self.kept(candidate)
        if not stays and not alone:
            gathered = min(one.total for one in pieces.sizes.values()) * job.width
        changing = max(kept + gathered, later + gathered + waiting)
        margin = 0.0 if self.cpu else DEVICE_BYTES + FRAGMENTATION * (min(kept, later) + gathered - pieces.extra)
        return static + max(changing, local * job.state * on_device) + max(0.0, margin)

    def host_memory(self, candidate: Candidate) -> float:
        """Returns the bytes that offloading needs in the memory of one host."""
        elements = {"none": 0, "optimizer": self.states, "parameters": 2 + self.states}[candidate.offload]
        local, job = self._local(candidate.layout, candidate.shard), self.pieces(candidate.layout.work).job
        return local * elements * job.state * min(self.hardware.node, self.space.devices)

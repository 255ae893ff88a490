"""A step of a pipeline: each rank follows the order of the schedule, and waits for inputs of other ranks.

The bubble is the time for which the busiest rank has nothing to do.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from weft.config.mesh import ParallelSection, Schedule
from weft.parallel.stages import stages_of_rank
from weft.planner.fsdp_passes import FsdpPasses
from weft.planner.schedules import Action, rank_actions
from weft.planner.timeline import Event, Parts, Timeline
from weft.planner.units import Job, Stage

ROUNDS = 3  # micro-batches that are simulated, in multiples of the number of stages; further ones repeat the last


def _stage_times(job: Job, stage: Stage) -> dict[str, Parts]:
    """Returns the parts of each kind of action of a stage.

    Kinds: `first` is the first forward pass, which gathers parameters; `F`, `B`, `I` and `W` are further passes;
    `gather` is gathering all parameters, `reduce` the reduction of all gradients.
    """

    def parts(run, *, first: bool = False) -> Parts:
        line = Timeline(job.hardware.overlap.slowdown)
        fsdp = FsdpPasses(job, stage, line, first=first, last=False)
        run(fsdp)
        line.drain()
        return line.parts

    whole = parts(FsdpPasses.backward)
    weights = Parts({"compute": sum(unit.passes.backward_weight for unit in stage.pieces)})
    reduce, every = Parts(), (*stage.pieces, stage.root)
    if not job.parallel.reduces_every:
        reduce["dp_shard"] = sum(unit.reduce + unit.around for unit in every)
        # The all-reduce of a unit runs beside the reduce-scatter of the next.
        reduce["dp_replicate"] = max(0.0, sum(unit.replicate for unit in every) - sum(u.reduce for u in stage.pieces))
    return {
        "first": parts(FsdpPasses.forward, first=True),
        "F": parts(FsdpPasses.forward),
        "B": whole,
        "I": whole.plus(weights, -1),
        "W": weights,
        "gather": Parts({"dp_shard": sum(unit.gather + unit.around for unit in every)}),
        "reduce": reduce,
    }


def simulate_pipeline(job: Job, stages: list[Stage]) -> tuple[Parts, Callable[[], list[list[Event]]]]:
    """Returns the parts of a step of the busiest pipeline rank, and a function that returns the events of all ranks."""
    times = [_stage_times(job, stage) for stage in stages]
    hidden = job.shares.tokens // job.mesh.tp * job.model.hidden_size * job.sent
    send = job.links.seconds("send", hidden, job.groups["pp"])
    ranks, count = job.mesh.pp, job.micro_batches
    rounds = max(0, (count - ROUNDS * ranks * job.parallel.virtual_stages) // ranks)
    few = count - rounds * ranks

    @cache
    def run(micro_batches: int, seconds: float) -> _Run:
        return _Run(job, times, micro_batches, seconds)

    def total(value) -> float:
        small = value(few)
        return small + rounds * (small - value(few - ranks)) if rounds else small

    step, alone = total(lambda n: run(n, send).end), total(lambda n: run(n, 0.0).end)
    busy = run(few, send).parts
    if rounds:
        before = run(few - ranks, send).parts
        busy = [parts.plus(parts, rounds).plus(less, -rounds) for parts, less in zip(busy, before, strict=True)]
    worst = max(busy, key=lambda parts: sum(parts.values()))
    worst["pp"] += max(0.0, step - alone)
    worst["bubble"] += max(0.0, step - sum(worst.values()))
    return worst, run(few, send).events


class _Pass(NamedTuple):
    """An action of a pipeline rank, with what does not depend on seconds.

    Attributes:
        needs: number of the action that makes its input, in the order of `ordered_passes`; -1 without one.
        sent: whether the input comes from another rank.
        first: whether it is the first forward pass of its stage.
        last: whether it is the last pass of its stage that makes gradients of weights.
    """

    action: Action
    rank: int
    needs: int
    sent: bool
    first: bool
    last: bool


@cache
def ordered_passes(schedule: Schedule, virtual: int, ranks: int, micro_batches: int) -> list[_Pass]:
    """Returns the actions of all pipeline ranks in an order in which each follows the one that makes its input."""
    parallel = ParallelSection(pp=ranks, pp_schedule=schedule, stages_per_rank=virtual)
    waiting = [deque(rank_actions(parallel, rank, ranks, micro_batches)) for rank in range(ranks)]
    left = Counter(action.stage for order in waiting for action in order if action.kind in "BW")
    last, found = ranks * virtual - 1, list[_Pass]()
    made: dict[tuple[str, int, int], int] = {}  # number of the action
    before = -1
    while before != (before := sum(map(len, waiting))):
        for rank, order in enumerate(waiting):
            while order and ((needed := _needed(order[0], last)) is None or needed in made):
                action = order.popleft()
                for kind in "BI" if action.kind in "BI" else action.kind:
                    made[kind, action.stage, action.micro_batch] = len(found)
                left[action.stage] -= action.kind in "BW"
                first = action.kind == "F" and not action.micro_batch
                ends = not left[action.stage] and action.kind in "BW"
                at = -1 if needed is None else made[needed]
                found.append(_Pass(action, rank, at, at >= 0 and found[at].rank != rank, first, ends))
    assert not before, "the orders of the pipeline ranks wait for each other"
    return found


def _needed(action: Action, last: int) -> tuple[str, int, int] | None:
    """Returns kind, stage and micro-batch of the action that makes the input; `last`: index of the last stage."""
    kind, stage, number = action
    if kind == "F":
        return ("F", stage - 1, number) if stage else None
    if kind == "W":
        return ("I", stage, number)
    return ("I", stage + 1, number) if stage < last else ("F", stage, number)


class _Run:
    """Runs the actions of all pipeline ranks; an action starts when its rank is free and its input has arrived.

    Args:
        times: parts of each kind of action of each stage.
        micro_batches: number of micro-batches.
        send: seconds of sending the hidden states or their gradients to another rank.

    Attributes:
        end: when the last rank has finished, its gradients reduced.
        parts: for each rank, the parts of its actions.
    """

    def __init__(self, job: Job, times: list[dict[str, Parts]], micro_batches: int, send: float):
        ranks, parallel = job.mesh.pp, job.parallel
        owned = [stages_of_rank(parallel, rank, ranks) for rank in range(ranks)]
        self.passes = ordered_passes(parallel.pp_schedule, parallel.virtual_stages, ranks, micro_batches)
        self.times, self.ranks = times, ranks
        self.seconds = [{kind: sum(parts.values()) for kind, parts in of.items()} for of in times]
        self.parts: list[Parts] = [Parts() for _ in range(ranks)]
        self.clocks, self.reduced = [0.0] * ranks, [0.0] * ranks
        # Schedules with several stages on a rank gather the parameters of a stage before its input arrives.
        self.gathered: dict[int, float] = {}
        if parallel.virtual_stages > 1 and not parallel.reshards:
            for own in owned:
                ends = accumulate(self.seconds[stage]["gather"] for stage in own)
                self.gathered.update(zip(own, ends, strict=True))
        self.starts, self.ends = self._run(send)
        counts = Counter((one.rank, one.action.stage, self._kind(one)) for one in self.passes)
        for (rank, stage, kind), number in counts.items():
            self.parts[rank] = self.parts[rank].plus(times[stage][kind], number)
        for rank, own in enumerate(owned):
            self._wait(rank, self.reduced[rank], own)
        self.end = max(self.clocks)

    def _kind(self, one: _Pass) -> str:
        """Returns the kind of an action in `times`."""
        return "first" if one.first and one.action.stage not in self.gathered else one.action.kind

    def _run(self, send: float) -> tuple[list[float], list[float]]:
        """Returns when each action starts and ends, in the order of `passes`."""
        clocks, seconds, starts, ends = self.clocks, self.seconds, list[float](), list[float]()
        for one in self.passes:
            (kind, stage, _), rank, needs, sent, first, last = one
            start = clocks[rank]
            if needs >= 0:
                start = max(start, ends[needs] + send if sent else ends[needs])
            if first:
                if (gathered := self.gathered.get(stage)) is not None:
                    self.parts[rank]["dp_shard"] += max(0.0, gathered - start)
                    start = max(start, gathered)
                kind = self._kind(one)
            end = clocks[rank] = start + seconds[stage][kind]
            starts.append(start)
            ends.append(end)
            if last:  # the gradients are reduced beside what follows
                self.reduced[rank] = max(self.reduced[rank], end) + seconds[stage]["reduce"]
        return starts, ends

    def _wait(self, rank: int, until: float, own: list[int]) -> None:
        """Makes a rank wait for the reduction of its gradients."""
        seconds = sum(self.seconds[stage]["reduce"] for stage in own)
        if until > self.clocks[rank]:
            for stage in own:
                share = (until - self.clocks[rank]) / seconds
                self.parts[rank] = self.parts[rank].plus(self.times[stage]["reduce"], share)
            self.clocks[rank] = until

    def events(self) -> list[list[Event]]:
        """Returns the actions of each rank."""
        found: list[list[Event]] = [[] for _ in range(self.ranks)]
        for one, start, end in zip(self.passes, self.starts, self.ends, strict=True):
            found[one.rank].append(Event("compute", f"{one.action.kind}{one.action.micro_batch}", start, end))
        return found

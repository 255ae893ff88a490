"""A step of a pipeline: each rank follows the order of the schedule, and waits for inputs of other ranks.

The bubble is the time for which the busiest rank has nothing to do.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import cache
from itertools import accumulate

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

    pieces = [unit for unit in (stage.first, *stage.units, stage.last) if unit is not None]
    whole = parts(FsdpPasses.backward)
    weights = Parts({"compute": sum(unit.passes.backward_weight for unit in pieces)})
    reduce, every = Parts(), (*stage.units, stage.root)
    if not job.parallel.reduces_every:
        reduce["dp_shard"] = sum(unit.reduce + unit.copies for unit in every)
        # The all-reduce of a unit runs beside the reduce-scatter of the next.
        reduce["dp_replicate"] = max(0.0, sum(unit.replicate for unit in every) - sum(u.reduce for u in stage.units))
    return {
        "first": parts(FsdpPasses.forward, first=True),
        "F": parts(FsdpPasses.forward),
        "B": whole,
        "I": whole.plus(weights, -1),
        "W": weights,
        "gather": Parts({"dp_shard": sum(unit.gather + unit.copies for unit in every)}),
        "reduce": reduce,
    }


def simulate_pipeline(job: Job, stages: list[Stage]) -> tuple[Parts, list[list[Event]]]:
    """Returns the parts of a step of the busiest pipeline rank, and the events of all ranks."""
    times = [_stage_times(job, stage) for stage in stages]
    hidden = job.shares.tokens // job.mesh.tp * job.model.hidden_size * job.state
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


class _Run:
    """Runs the actions of all pipeline ranks; an action starts when its rank is free and its input has arrived.

    Args:
        times: parts of each kind of action of each stage.
        micro_batches: number of micro-batches.
        send: seconds of sending the hidden states or their gradients to another rank.

    Attributes:
        end: when the last rank has finished, its gradients reduced.
        parts: for each rank, the parts of its actions.
        events: for each rank, its actions.
    """

    def __init__(self, job: Job, times: list[dict[str, Parts]], micro_batches: int, send: float):
        ranks = job.mesh.pp
        owned = [stages_of_rank(job.parallel, rank, ranks) for rank in range(ranks)]
        self.times, self.send, self.last = times, send, len(times) - 1
        self.seconds = [{kind: sum(parts.values()) for kind, parts in of.items()} for of in times]
        self.done: dict[tuple[str, int, int], tuple[float, int]] = {}
        self.parts: list[Parts] = [Parts() for _ in range(ranks)]
        self.counts: Counter[tuple[int, int, str]] = Counter()  # actions by rank, stage and kind
        self.events: list[list[Event]] = [[] for _ in range(ranks)]
        self.clocks, self.reduced = [0.0] * ranks, [0.0] * ranks
        # Schedules with several stages on a rank gather the parameters of a stage before its input arrives.
        self.gathered: dict[int, float] = {}
        if job.parallel.virtual_stages > 1 and not job.parallel.reshards:
            for own in owned:
                ends = accumulate(self.seconds[stage]["gather"] for stage in own)
                self.gathered.update(zip(own, ends, strict=True))
        waiting = [deque(rank_actions(job.parallel, rank, ranks, micro_batches)) for rank in range(ranks)]
        self.left = Counter(action.stage for order in waiting for action in order if action.kind in "BW")
        before = -1
        while before != (before := sum(map(len, waiting))):
            for rank, order in enumerate(waiting):
                while order and (ready := self._ready(order[0], rank)) is not None:
                    self._run(order.popleft(), rank, ready)
        assert not before, "the orders of the pipeline ranks wait for each other"
        for (rank, stage, kind), number in self.counts.items():
            self.parts[rank] = self.parts[rank].plus(times[stage][kind], number)
        for rank, own in enumerate(owned):
            self._wait(rank, self.reduced[rank], own)
        self.end = max(self.clocks)

    def _run(self, action: Action, rank: int, ready: float) -> None:
        stage, first = action.stage, action.kind == "F" and not action.micro_batch
        start = self.clocks[rank] = max(ready, self.clocks[rank])
        if first and stage in self.gathered:
            self.parts[rank]["dp_shard"] += max(0.0, self.gathered[stage] - start)
            start = self.clocks[rank] = max(start, self.gathered[stage])
            first = False
        self._count(rank, stage, "first" if first else action.kind)
        end = self.clocks[rank]
        for kind in "BI" if action.kind in "BI" else action.kind:
            self.done[kind, stage, action.micro_batch] = (end, rank)
        self.events[rank].append(Event("compute", f"{action.kind}{action.micro_batch}", start, end))
        self.left[stage] -= action.kind in "BW"
        if not self.left[stage] and action.kind in "BW":  # the gradients are reduced beside what follows
            self.reduced[rank] = max(self.reduced[rank], end) + self.seconds[stage]["reduce"]

    def _wait(self, rank: int, until: float, own: list[int]) -> None:
        """Makes a rank wait for the reduction of its gradients."""
        seconds = sum(self.seconds[stage]["reduce"] for stage in own)
        if until > self.clocks[rank]:
            for stage in own:
                share = (until - self.clocks[rank]) / seconds
                self.parts[rank] = self.parts[rank].plus(self.times[stage]["reduce"], share)
            self.clocks[rank] = until

    def _count(self, rank: int, stage: int, kind: str) -> None:
        self.clocks[rank] += self.seconds[stage][kind]
        self.counts[rank, stage, kind] += 1

    def _ready(self, action: Action, rank: int) -> float | None:
        """Returns when the input of an action has arrived; None if it does not exist yet."""
        kind, stage, number = action
        if kind == "F":
            needed = ("F", stage - 1, number) if stage else None
        elif kind == "W":
            needed = ("I", stage, number)
        else:
            needed = ("I", stage + 1, number) if stage < self.last else ("F", stage, number)
        if needed is None:
            return 0.0
        found = self.done.get(needed)
        if found is None:
            return None
        return found[0] + (self.send if found[1] != rank else 0.0)

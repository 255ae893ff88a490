"""Searches pipeline stages: where they begin, the schedule, and the number of micro-batches.

Stages begin with repeated blocks. For each number of pipeline ranks, the stages of a device mesh `dp` x `tp` run by the
best choice of placements for this mesh. Blocks are balanced over the stages by their seconds, and the schedule is
simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.config.mesh import SPLIT_BACKWARD, ParallelSection, Schedule
from weft.parallel.axes.pipeline import SCHEDULES
from weft.parallel.stages import balance_layers
from weft.planner.communication import Group
from weft.planner.hardware import Hardware
from weft.planner.parallelize.graph import Graph, Ref
from weft.planner.parallelize.plan import Plan
from weft.planner.parallelize.pricing import STATE_COPIES, Parts, Prices, Setting, Split, Steps
from weft.planner.parallelize.stage_table import stages_of
from weft.planner.parallelize.stage_trace import trace_stages
from weft.planner.parallelize.tables import Found
from weft.planner.pipeline import ordered_passes
from weft.planner.schedules import Kind

# Simpler schedules first. `gpipe` is as fast as `1f1b`, and needs more memory.
TRIED: tuple[Schedule, ...] = (
    "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"
)  # fmt: skip
SIMPLER = 0.005  # by which each schedule must be faster than the one before


class Passes(NamedTuple):
    """Seconds of the passes of a stage for a micro-batch: forward, backward, and the parts of backward."""

    forward: float
    backward: float
    weights: float

    def of(self, kind: Kind) -> float:
        """Returns the seconds of an action of a schedule."""
        found = {"F": self.forward, "B": self.backward, "W": self.weights, "I": self.backward - self.weights}
        return found[kind]


class Staged(NamedTuple):
    """The best stages for one setting of a stage's mesh.

    Attributes:
        seconds: of a step.
        found: the choice within a stage.
        pp: number of pipeline ranks.
        begins: names of the modules with whose call stages begin.
        schedule: name of the schedule in Weft.
        micro_batches: number of micro-batches.
        memory: bytes of the rank that needs most.
        parts: seconds and bytes of the busiest rank.
        pp_seconds: seconds that sending, and sums of gradients of shared parameters, add.
        bubble: seconds for which the busiest rank waits.
        shares: for each stage, the fraction of the seconds of computation.
    """

    seconds: float
    found: Found
    pp: int
    begins: tuple[str, ...]
    schedule: Schedule
    micro_batches: int
    memory: float
    parts: Parts
    pp_seconds: float
    bubble: float
    shares: tuple[float, ...]


@dataclass
class Blocks:
    """The blocks of a module in the order of their calls, with what each costs; the rest counts to its neighbor.

    Attributes:
        names: names of the blocks.
        parts: seconds and bytes of each block.
        stream: bytes of the tensor that one block passes to the next, of a micro-batch of a data rank.
        shared: parameters outside of blocks: their bytes on a rank, and the numbers of the blocks that use them.
    """

    names: list[str]
    parts: list[Parts]
    stream: float
    shared: list[tuple[float, set[int]]]


def can_have_stages(graph: Graph) -> bool:
    """Whether a module returns a scalar loss, has repeated blocks, and no statistics of the batch."""
    outputs = [graph.node(ref).shape for node in graph.nodes if node.kind == "output" for ref in node.inputs]
    norms = any("batch_norm" in str(node.target) for node in graph.nodes)
    return outputs == [()] and not norms and bool(graph.repeats)


def blocks_of(found: Found, prices: Prices) -> Blocks:
    """Returns the blocks with the costs of a choice."""
    space, graph = prices.space, prices.space.graph
    starts = {
        one.paths[0]: min(
            place for place, node in enumerate(graph.nodes) if node.kind == "op" and one.paths[0] in node.modules
        )
        for one in graph.repeats
    }
    groups = sorted((one.paths for one in graph.repeats), key=lambda paths: starts[paths[0]])
    names = [path for paths in groups for path in paths]
    parts = [Parts() for _ in names]
    users = {ref.node: place for place in reversed(range(len(space.steps))) for ref in space.steps[place].inputs}
    block, owner = 0, list[int]()
    within: list[tuple[str, ...] | None] = []
    for step in space.steps:  # what is between blocks belongs to the block before
        path = (*step.node.modules, step.node.name)
        within.append(next((paths for paths in groups if paths[0] in path), None))
        if (paths := within[-1]) is not None and step.kind == "op":
            block = names.index(paths[-1])
        owner.append(block)
    for place, (step, strategy) in enumerate(zip(space.steps, found.strategies, strict=True)):
        one, paths = prices.parts(place, strategy), within[place]
        if paths is None or (step.kind in ("enter", "leave") and step.node.times == 1):
            parts[owner[users.get(place, place) if step.kind == "parameter" else place]] += one
            continue
        for path in paths:
            parts[names.index(path)] += _share(one, len(paths))
    shared = [
        (
            prices.held(state.forward) * meta.bytes * prices.setting.widening,
            {owner[user] for user, one in enumerate(space.steps) if Ref(place) in one.inputs},
        )
        for place, (step, strategy) in enumerate(zip(space.steps, found.strategies, strict=True))
        if step.kind == "parameter" and within[place] is None and step.trained[0]
        if (state := strategy.outputs[0]) is not None and (meta := step.outputs[0]) is not None
    ]
    return Blocks(names, parts, _stream(graph, groups[0][0]) / prices.pieces, shared)


def _stream(graph: Graph, block: str) -> float:
    """Returns the bytes of the largest tensor with a gradient that a block takes."""
    within = {place for place, node in enumerate(graph.nodes) if node.kind == "op" and block in node.modules}
    refs = [ref for place in within for ref in graph.nodes[place].inputs if ref.node not in within]
    return max(
        (
            graph.node(one).bytes
            for one in refs
            if graph.nodes[one.node].kind == "op" and graph.nodes[one.node].trained[one.index]
        ),
        default=0.0,
    )


def _share(parts: Parts, count: int) -> Parts:
    return Parts(*(value / count for value in vars(parts).values()))


def best_stages(found: Found, hardware: Hardware, steps: Steps, limit: float) -> tuple[Staged | None, bool]:
    """Returns the fastest stages with a choice of placements within a stage, and whether all tried fit the memory.

    The stages are None if none fit.
    """
    tried: list[Staged] = []
    setting, space, known = found.setting, found.prices.space, dict[Split, Blocks]()
    for schedule in TRIED:
        section = ParallelSection(pp=setting.pp, pp_schedule=schedule)
        if schedule in SPLIT_BACKWARD and setting.recompute:  # of two backward passes, one would have no activations
            continue
        for split in steps.splits(space.graph.rows, setting.pp, setting.dp, schedule):
            if split not in known:
                prices = Prices(space, hardware, replace(setting, split=split), found.prices.costs.dtype)
                known[split] = blocks_of(found, prices)
            enough = len(known[split].names) >= setting.pp * section.virtual_stages
            if enough and section.supports(split.micro_batches, setting.pp):
                tried.append(_stages_with(found, known[split], split.micro_batches, section))
    fitting = [one for one in tried if one.memory <= limit]
    best = min(fitting, key=lambda one: one.seconds * (1 + SIMPLER * TRIED.index(one.schedule)), default=None)
    return best, len(fitting) == len(tried)


def _stages_with(found: Found, blocks: Blocks, count: int, section: ParallelSection) -> Staged:
    """Returns the stages for a schedule and a number of micro-batches."""
    setting, links = found.setting, found.prices.links
    schedule, virtual, pp = section.pp_schedule, section.virtual_stages, section.pp
    counts = balance_layers([one.compute + one.tp for one in blocks.parts], pp * virtual)
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    stages = [sum(blocks.parts[end - n : end], Parts()) for n, end in zip(counts, ends, strict=True)]
    times = [(one.compute + one.tp) / count for one in stages]
    passes = [
        Passes(one.forward / count, total - one.forward / count, one.weights / count)
        for one, total in zip(stages, times, strict=True)
    ]
    saved = [one.activations for one in stages]
    send = links.seconds("send", blocks.stream, Group(pp, setting.dp * setting.tp))
    run, alone = (simulate(schedule, virtual, pp, count, passes, one, saved) for one in (send, 0.0))
    owned = stages_of(pp, [("", ())] * len(stages), SCHEDULES[schedule], count)
    ranks = [sum((stages[one] for one in owned.stages_of(rank)), Parts()) for rank in range(pp)]
    memory, states = max((_states(setting, one) + peak, one.states) for one, peak in zip(ranks, run.peaks, strict=True))
    shared = 0.0
    for size, users in blocks.shared:  # gradients of parameters that several ranks have are summed
        owners = {owned.rank_of(next(stage for stage, end in enumerate(ends) if block < end)) for block in users}
        group = Group(len(owners), setting.dp * setting.tp)
        shared += links.seconds("all_reduce", size, group) if len(owners) > 1 else 0.0
    busiest, data = max(ranks, key=lambda one: one.compute + one.tp), max(one.dp for one in ranks)
    return Staged(
        run.seconds + data + shared, found, pp, ("", *(blocks.names[end] for end in ends[:-1])), schedule, count,
        memory, replace(busiest, dp=data, states=states), run.seconds - alone.seconds + shared,
        alone.seconds - busiest.compute - busiest.tp, tuple(one / (sum(times) or 1.0) for one in times),
    )  # fmt: skip


def _states(setting: Setting, parts: Parts) -> float:
    """Returns the bytes of parameters, gradients and moments of a rank in a call, for which parameters are gathered."""
    gathered = 2 / STATE_COPIES * parts.states * setting.dp if setting.dp > 1 and setting.shard else 0.0
    return parts.states + gathered


class Simulated(NamedTuple):
    """A simulated step: its seconds, and for each rank the largest bytes of saved activations."""

    seconds: float
    peaks: list[float]


def simulate(
    schedule: Schedule,
    virtual: int,
    pp: int,
    micro_batches: int,
    passes: Sequence[Passes],
    send: float,
    saved: Sequence[float],
) -> Simulated:
    """Returns a step of a schedule: a pass starts when its rank is free and its input has arrived.

    Args:
        passes: seconds of the passes of each stage.
        send: seconds of sending a tensor to the next rank.
        saved: bytes that each stage saves in forward for one micro-batch.
    """
    clocks, ends = [0.0] * pp, list[float]()
    held, peaks = [0.0] * pp, [0.0] * pp
    for one in ordered_passes(schedule, virtual, pp, micro_batches):
        kind, stage, _ = one.action
        arrived = ends[one.needs] + (send if one.sent else 0.0) if one.needs >= 0 else 0.0
        clocks[one.rank] = max(clocks[one.rank], arrived) + passes[stage].of(kind)
        ends.append(clocks[one.rank])
        held[one.rank] += {"F": saved[stage], "I": 0.0}.get(kind, -saved[stage])
        peaks[one.rank] = max(peaks[one.rank], held[one.rank])
    return Simulated(max(clocks), peaks)


# ---- the plan


def with_stages(
    plan: Plan, staged: Staged, model: nn.Module, call: Any, loss: Callable[..., torch.Tensor] | None
) -> Plan:
    """Returns a plan for a stage's mesh, with stages.

    Args:
        call: positional and keyword arguments of the module.
    """
    trace = trace_stages(model, staged.begins, *call, loss=loss, islands=lambda name: plan.islands.get(name))
    table = tuple(
        (begin, tuple(names_of(model, {name for name, users in trace.uses.items() if stage in users})))
        for stage, begin in enumerate(staged.begins)
    )
    notes = {f"stages {number}": f"{share:.0%} of the computation" for number, share in enumerate(staged.shares)}
    prediction = {
        **plan.prediction,
        "step_seconds": staged.seconds,
        "memory_bytes": staged.memory,
        "compute_seconds": staged.parts.compute,
        "tp_seconds": staged.parts.tp,
        "dp_seconds": staged.parts.dp,
        "pp_seconds": staged.pp_seconds,
        "bubble_seconds": staged.bubble,
        "state_bytes": staged.parts.states,
    }
    return replace(
        plan, pp=staged.pp, stages=table, schedule=SCHEDULES[staged.schedule], micro_batches=staged.micro_batches,
        prediction=prediction, notes={**plan.notes, **notes}, loss=loss,
    )  # fmt: skip


def names_of(model: nn.Module, wanted: set[str]) -> list[str]:
    """Returns names of modules and parameters that cover some parameters; `h.0..3` for neighbors in a list."""

    def visit(module: nn.Module, path: str) -> list[str]:
        names = [f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters(remove_duplicate=False)]
        if path and names and all(name in wanted for name in names):
            return [path]
        own = [f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False)]
        found = [name for name in own if name in wanted]
        for name, child in module.named_children():
            found += visit(child, f"{path}.{name}".lstrip("."))
        return found

    merged: list[str] = []
    for name in visit(model, ""):
        parent, _, last = name.rpartition(".")
        first, _, end = merged[-1].removeprefix(f"{parent}.").partition("..") if merged else ("", "", "")
        same = bool(merged) and merged[-1].startswith(f"{parent}.") and first.isdigit() and last.isdigit()
        if same and int(end or first) + 1 == int(last):
            merged[-1] = f"{parent}.{first}..{last}"
            continue
        merged.append(name)
    return merged


def stage_settings(devices: int) -> list[int]:
    """Returns the numbers of pipeline ranks to search."""
    return [pp for pp in range(2, devices + 1) if devices % pp == 0 and pp & (pp - 1) == 0]

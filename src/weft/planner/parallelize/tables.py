"""Makes a plan of the choice of a strategy for each step: tables by patterns of names, with the reason of each line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Shard

from weft.planner.hardware import Hardware
from weft.planner.parallelize.explain import FULL
from weft.planner.parallelize.graph import Graph
from weft.planner.parallelize.plan import Plan, structure_of
from weft.planner.parallelize.pricing import Parts, Prices, Setting
from weft.planner.parallelize.solve import Choice
from weft.planner.parallelize.space import Space
from weft.planner.parallelize.steps import Step, Strategy


@dataclass
class Found:
    """The best choice for one setting.

    Attributes:
        setting: mesh and memory options.
        choice: the solution.
        strategies: the strategy of each step of the space, on the last tensor axis.
        prices: what it was priced by.
    """

    setting: Setting
    choice: Choice
    strategies: list[Strategy]
    prices: Prices


@dataclass
class Search:
    """A search, and what it found.

    Attributes:
        space: the operations of the module with their strategies.
        found: the best choice for each setting that fits the memory, and that no other of the same mesh dominates.
        unlimited: (dp, tp) of meshes whose fastest choice of all fits the memory.
        needed: for each setting that does not fit, the bytes that it needs.
        seconds: seconds of capture, trials and solver.
    """

    space: Space
    found: list[Found] = field(default_factory=list)
    needed: dict[Setting, float] = field(default_factory=dict)
    unlimited: set[tuple[int, int]] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)


def make_plan(module: nn.Module, search: Search, best: Found, hardware: Hardware) -> Plan:
    """Returns the plan of a choice: tables by patterns of names, with the reason of each line."""
    graph = search.space.graph
    patterns = _Patterns(module, graph)
    tables: dict[str, dict[str, Any]] = {"parameters": {}, "inputs": {}, "outputs": {}, "islands": {}}
    notes: dict[str, str] = {}

    def add(topic: str, name: str, value: Any, why: str) -> None:
        for pattern in patterns.of(name):
            tables[topic][pattern], notes[f"{topic} {pattern}"] = value, why

    for place, step in enumerate(search.space.steps):
        chosen = best.prices.chosen(place, best.strategies[place])
        placed = [one.outputs[0].forward[0] for one in chosen if one.outputs and one.outputs[0] is not None]
        if not placed:
            continue
        value = placed[0] if len(placed) == 1 else tuple(placed)
        if step.kind == "parameter" and any(isinstance(one, Shard) for one in placed):
            tied = [other for other, full in graph.tied.items() if full == step.node.name]
            for name in (step.node.name, *tied):
                add("parameters", name, value, _why_parameter(best, place, placed))
        elif any(one.moved for one in chosen):
            topic = "inputs" if step.kind == "enter" else "outputs"
            add(topic, step.node.name, value, _why_move(best.prices, place, step, chosen))
    for path, why in graph.islands.items():
        add("islands", path, "whole", f"{why.partition('; ')[0]}; each rank computes all rows")
    for step in search.space.unsupported:
        place = search.space.steps.index(step)
        notes[f"{FULL} {step.node.name}"] = _why_full(search, best.prices.parts(place, best.strategies[place]), step)
    blocks = [repeat.paths[0] for repeat in graph.repeats] if best.setting.recompute else []
    return Plan(
        dp=best.setting.dp,
        tp=best.setting.tp,
        tp2=best.setting.tp2,
        parameters=tables["parameters"],
        inputs=tables["inputs"],
        outputs=tables["outputs"],
        islands=tables["islands"],
        recompute=tuple(pattern for path in blocks for pattern in patterns.of(path)),
        shard_parameters=best.setting.shard,
        reshard_after_forward=best.setting.reshard,
        structure=structure_of(module),
        notes=notes | {"hardware": hardware.device.name, "searched": _searched(search)},
        prediction=_prediction(best),
    )


def splits(strategies: Sequence[Strategy]) -> bool:
    """Whether strategies on a tensor axis split any tensor."""
    states = [state for one in strategies for state in one.outputs if state is not None]
    return any(isinstance(state.forward[0], Shard) for state in states)


def _prediction(best: Found) -> dict[str, float]:
    parts = sum((best.prices.parts(place, one) for place, one in enumerate(best.strategies)), Parts())
    return {
        "step_seconds": parts.compute + parts.tp + parts.dp,
        "compute_seconds": parts.compute,
        "tp_seconds": parts.tp,
        "dp_seconds": parts.dp,
        "memory_bytes": best.choice.memory,
        "state_bytes": parts.states,
        "optimality_gap": best.choice.gap,
    }


class _Patterns:
    """Names of the first of repeated blocks -> patterns that match the names of all of them."""

    def __init__(self, module: nn.Module, graph: Graph):
        self.prefixes: dict[str, list[str]] = {}
        for repeat in graph.repeats:
            parent = repeat.paths[0].rpartition(".")[0]
            siblings = [f"{parent}.{name}".lstrip(".") for name, _ in module.get_submodule(parent).named_children()]
            every = set(siblings) == set(repeat.paths)
            self.prefixes[repeat.paths[0]] = [f"{parent}.*".lstrip(".")] if every else list(repeat.paths)

    def of(self, name: str) -> list[str]:
        """Returns the patterns for a name."""
        for first, others in self.prefixes.items():
            if name == first or name.startswith(f"{first}."):
                return [other + name[len(first) :] for other in others]
        return [name]


def _why_parameter(best: Found, place: int, placed: Sequence[Placement]) -> str:
    """Returns what the placement of a parameter splits, and what its collectives take in a step."""
    space = best.prices.space
    step, parts = space.steps[place], best.prices.parts(place, best.strategies[place])
    meta = step.outputs[0]
    assert meta is not None
    users = [user.node for user in space.steps if any(ref.node == place for ref in user.inputs)]
    operator = str(users[0].target).removeprefix("aten.").partition(".")[0] if users else ""
    dims = dict.fromkeys(one.dim for one in placed if isinstance(one, Shard))
    words = " and ".join(_DIMS.get((operator, dim), f"dim {dim}") for dim in dims)
    shape = " x ".join(map(str, meta.shape))
    seconds = parts.dp + parts.tp
    return f"{shape}: splits {words}" + (f"; {1e3 * seconds:.3g} ms of collectives a step" if seconds else "")


_DIMS = {
    ("linear", 0): "output features",
    ("linear", 1): "input features; results are summed",
    ("embedding", 0): "the vocabulary; results are summed",
    ("embedding", 1): "features",
    ("conv2d", 0): "output channels",
}


def _why_full(search: Search, parts: Parts, step: Step) -> str:
    """Returns where an operation is that runs on full tensors, why, and what it costs in a step."""
    name = str(step.node.target).removeprefix("aten.").partition(".")[0]
    why = search.space.trials.errors.get(step.key) or ""
    cost = f"{1e3 * (parts.compute + parts.tp):.3g} ms on every rank"
    return f"{name}: {step.node.source or 'the module'}: {cost} ({why[:120] or 'no sharding rule'})"


def _why_move(prices: Prices, place: int, step: Step, chosen: Sequence[Strategy]) -> str:
    rows = prices.rows[place]
    passes = {"forward": [one.forward for one in chosen], "backward": [one.backward for one in chosen]}
    words = [
        f"{collective(move.source[0], move.target[0])} {when} {1e3 * seconds:.3g} ms"
        for when, works in passes.items()
        for move, seconds in prices.moves(step, chosen, works, rows)
        if seconds
    ]
    times = f", {step.node.times} times" if step.node.times > 1 else ""
    return (", ".join(words) or "no communication") + times


def collective(source: Placement, target: Placement) -> str:
    """Returns the collective of a redistribution."""
    if isinstance(source, Shard):
        return "all-to-all" if isinstance(target, Shard) else "all-gather"
    return "reduce-scatter" if isinstance(target, Shard) else "all-reduce"


def _searched(search: Search) -> str:
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in search.seconds.items())
    return f"{len(search.found)} settings fit of {len(search.found) + len(search.needed)}; {spent}"

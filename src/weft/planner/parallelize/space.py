"""The space of plans of a graph: for each operation all strategies, and the places where a plan can redistribute.

A plan redistributes the first floating-point input or output of a module. Everywhere else, DTensor decides by the
placements that it is given, and strategies follow it. So a choice of strategies that fit together is what will happen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from torch.distributed.tensor import Partial, Replicate, Shard

from weft.planner.parallelize.capture import ISLAND
from weft.planner.parallelize.graph import Graph, Meta, Node, Ref
from weft.planner.parallelize.steps import Step, Strategy
from weft.planner.parallelize.strategies import (
    TRIED,
    Move,
    Placed,
    State,
    Trial,
    Trials,
    Work,
    fits,
    normal,
)
from weft.torch_private import tree_map_only

WIDEST = 48  # trials of one operator at most; those with the fewest different placements come first
WIDEST_FULL = 256  # likewise, of the placements from which the inputs of an operation are gathered
NOWHERE: Placed = (Replicate(),)
NONE = (False,)


class Space:
    """The steps of a graph, with strategies.

    Args:
        graph: the graph.
        trials: remembers trials; the same for several spaces.
    """

    def __init__(self, graph: Graph, trials: Trials):
        self.graph, self.trials = graph, trials
        self.steps: list[Step] = []
        self.ends: list[tuple[Ref, Ref]] = []  # of repeated blocks: what the first takes, and what it returns
        self.unsupported: list[Step] = []
        self._unroll()
        self.used = {ref for step in self.steps for ref in step.inputs}
        for _ in range(2 if self.ends else 1):
            self._forward()
        for _ in range(2 if self.ends else 1):
            self._backward()

    def meta(self, ref: Ref) -> Meta:
        """Returns shape and dtype of an output of a step."""
        found = self.steps[ref.node].outputs[ref.index]
        assert found is not None
        return found

    # ---- places of redistribution

    def _unroll(self) -> None:
        """Adds the nodes of the graph, and between them the places of redistribution."""
        entering, leaving = self._crossings()
        places: dict[int, int] = {}
        known: dict[tuple[Ref, str, str], Ref] = {}

        def cross(ref: Ref, modules: tuple[str, ...]) -> Ref:
            source = self.graph.nodes[ref.node]
            found = Ref(places[ref.node], ref.index)
            if source.kind == "parameter":
                return found
            for kind, path in _crossed(source.modules, modules):
                if (entering if kind == "enter" else leaving).get(path) != [ref]:
                    continue
                key = (ref, kind, path)
                if key not in known:
                    meta, trained = self.graph.node(ref), source.trained[ref.index]
                    times = source.times
                    if kind == "enter":
                        times = max((n.times for n in self.graph.nodes if path in n.modules), default=1)
                    node = Node(path, kind, outputs=(meta,), modules=_parents(path), times=times)
                    known[key] = Ref(len(self.steps))
                    self.steps.append(Step(node, [found], (meta,), (trained,)))
                found = known[key]
            return found

        for place, node in enumerate(self.graph.nodes):
            inputs = [cross(ref, node.modules) for ref in node.inputs]
            places[place] = len(self.steps)
            self.steps.append(Step(node, inputs, node.outputs, node.trained or (False,) * len(node.outputs)))
            if node.kind == "op":
                metas = tuple((self.meta(ref), self.steps[ref.node].trained[ref.index]) for ref in inputs)
                template = tree_map_only(Ref, lambda _: "*", (node.args, node.kwargs))
                self.steps[-1].key = (str(node.target), str(template), metas)
        for repeat in self.graph.repeats:
            if repeat.entry is None or repeat.result is None:
                continue
            entry = known.get((repeat.entry, "enter", repeat.paths[0]))
            if entry is not None:  # only the first block takes another tensor than a result
                self.steps[entry.node].node.times = 1
            self.ends.append((entry or _moved(repeat.entry, places), _moved(repeat.result, places)))

    def _crossings(self) -> tuple[dict[str, list[Ref]], dict[str, list[Ref]]]:
        """Returns, for each module, the floating-point tensors that enter it and that leave it.

        Tensors without a gradient that enter beside one with a gradient, such as masks, do not count.
        """
        entering: dict[str, list[Ref]] = {}
        leaving: dict[str, list[Ref]] = {}
        for node in self.graph.nodes:
            for ref in node.inputs:
                source, meta = self.graph.nodes[ref.node], self.graph.node(ref)
                if source.kind == "parameter" or not meta.dtype.is_floating_point or len(meta.shape) < 2:
                    continue
                for kind, path in _crossed(source.modules, node.modules):
                    found = (entering if kind == "enter" else leaving).setdefault(path, [])
                    if ref not in found:
                        found.append(ref)
        for path, refs in entering.items():
            trained = [ref for ref in refs if self.graph.nodes[ref.node].trained[ref.index]]
            entering[path] = trained or refs
        return entering, leaving

    # ---- strategies

    def _forward(self) -> None:
        """Finds the placements that each tensor can have, and tries each operation with them."""
        again = {entry: self.steps[result.node].forwards for entry, result in self.ends}
        for place, step in enumerate(self.steps):
            given = [sorted(self.steps[ref.node].forwards[ref.index], key=str) for ref in step.inputs]
            if step.kind == "op":
                self._try(step, given)
            elif step.kind in ("enter", "leave"):
                step.forwards = [{*given[0], *(two for one in given[0] for two in targets(step.outputs[0], one))}]
            elif step.kind == "parameter":
                used = Ref(place) in self.used  # an island needs full parameters
                step.forwards = [set(parameter_placements(step.outputs[0])) if used else {NOWHERE}]
            else:
                step.forwards = [{NOWHERE} for _ in step.outputs]
            for ref, forwards in again.items():
                if ref.node == place and forwards:
                    result = next(two for one, two in self.ends if one == ref)
                    step.forwards[ref.index] |= forwards[result.index]

    def _try(self, step: Step, given: list[list[Placed]]) -> None:
        if str(step.node.target) == ISLAND:
            step.forwards = [{NOWHERE} for _ in step.outputs]
            return
        metas = [self.meta(ref) for ref in step.inputs]
        trained = [self.steps[ref.node].trained[ref.index] for ref in step.inputs]
        tensors = list(zip(metas, trained, strict=True))
        even = [[one for one in each if fits(meta, one, TRIED)] for each, meta in zip(given, metas, strict=True)]
        combinations = sorted(product(*even), key=lambda each: (len(set(each)), str(each)))[:WIDEST]
        step.forwards = [set() for _ in step.outputs]
        step.trials = []
        for placed in combinations:
            trial = self.trials.forward(step.key, step.node, tensors, placed)
            if trial is None or not _within(trial, step):
                continue
            step.trials.append((placed, trial))
            for found, one in zip(step.forwards, trial.outputs, strict=True):
                if one is not None:
                    found.add(one)
        whole = tuple(NOWHERE for _ in metas)
        full = self.trials.forward(step.key, step.node, tensors, whole)
        if full is not None:
            step.full_forward, step.extra, step.kept = full.work, full.extra, set(full.saved_outputs)
            for place in full.saved:
                ref = step.inputs[place]
                self.steps[ref.node].kept.add(ref.index)
                while self.steps[ref.node].kind in ("enter", "leave"):  # the same tensor, if it is not redistributed
                    ref = self.steps[ref.node].inputs[0]
                    self.steps[ref.node].kept.add(ref.index)
            back = self.trials.backward((step.key, whole), full, tuple(NONE for _ in full.outputs))
            step.full_backward = back[1] if back is not None else Work()
        if not step.trials:  # DTensor cannot run it: the runtime calls it with full tensors
            step.forwards = [{NOWHERE} for _ in step.outputs]
            tensors_of = [*metas, *(one for one in step.outputs if one is not None)]
            step.full_forward = Work(bytes=sum(one.bytes for one in tensors_of), calls=1)
            step.full_backward = step.full_forward if any(step.trained) else Work()

    def _backward(self) -> None:
        """Makes strategies from trials: for each, with the gradients that the following operations hand back."""
        wanted: dict[Ref, set[tuple[bool, ...]]] = {}
        for entry, result in self.ends:
            wanted[result] = {s.partial for step in self.steps for s in _demands(step, entry)}
        for place in reversed(range(len(self.steps))):
            step = self.steps[place]
            flags = [wanted.get(Ref(place, index), set()) | {NONE} for index in range(len(step.outputs))]
            step.strategies = list(self._strategies(step, flags))
            for strategy in step.strategies:
                for ref, state in zip(step.inputs, strategy.inputs, strict=True):
                    wanted.setdefault(ref, set()).add(state.partial)

    def _strategies(self, step: Step, flags: Sequence[set[tuple[bool, ...]]]) -> Iterator[Strategy]:
        if step.kind == "op":
            found = [] if str(step.node.target) == ISLAND else list(self._of_operation(step, flags))
            yield from found
            if not any(all(one.forward == NOWHERE for one in each.inputs) for each in found):
                yield from self._on_full_tensors(step)
                if str(step.node.target) != ISLAND and step not in self.unsupported:
                    self.unsupported.append(step)
        elif step.kind in ("enter", "leave"):
            yield from self._of_place(step, flags[0])
        elif step.kind == "output":
            yield from self._on_full_tensors(step)
        else:
            for one in sorted(step.forwards[0], key=str):
                for partial in sorted(flags[0] if step.trained[0] else {NONE}):
                    if _possible(one, partial):
                        yield Strategy((), (State(one, partial),), Work(), Work())

    def _on_full_tensors(self, step: Step) -> Iterator[Strategy]:
        """Strategies of an operation whose inputs the runtime gathers, with any placement of them."""
        choices = [sorted(self.steps[ref.node].forwards[ref.index], key=str) for ref in step.inputs]
        outputs = tuple(State(NOWHERE) if one is not None else None for one in step.outputs)
        for placed in sorted(product(*choices), key=lambda each: sum(one != NOWHERE for one in each))[:WIDEST_FULL]:
            moves = [
                Move(self.meta(ref), one, NOWHERE)
                for ref, one in zip(step.inputs, placed, strict=True)
                if one != NOWHERE
            ]
            forward = replace(step.full_forward, moves=moves)
            yield Strategy(tuple(map(State, placed)), outputs, forward, step.full_backward)

    def _of_operation(self, step: Step, flags: Sequence[set[tuple[bool, ...]]]) -> Iterator[Strategy]:
        for placed, trial in step.trials:
            some = sorted({each for one in flags for each in one})
            if not any(step.trained):
                some = [NONE]
            seen = set()
            for sums in some:
                partial = tuple(
                    tuple(s and isinstance(p, Replicate) for s, p in zip(sums, one, strict=True)) if one else NONE
                    for one in trial.outputs
                )
                if partial in seen:
                    continue
                seen.add(partial)
                found = self.trials.backward((step.key, placed), trial, partial)
                if found is None:
                    continue
                inputs = tuple(map(State, placed, found[0]))
                outputs = tuple(
                    State(one, two) if one is not None else None
                    for one, two in zip(trial.outputs, partial, strict=True)
                )
                yield Strategy(inputs, outputs, trial.work, found[1])

    def _of_place(self, step: Step, flags: set[tuple[bool, ...]]) -> Iterator[Strategy]:
        meta = step.outputs[0]
        assert meta is not None
        ref, trained = step.inputs[0], step.trained[0]
        sums = sorted(flags) if trained else [NONE]
        for one in sorted(self.steps[ref.node].forwards[ref.index], key=str):
            for partial in sums:
                if _possible(one, partial):
                    yield Strategy((State(one, partial),), (State(one, partial),), Work(), Work())
            for two in targets(meta, one):
                for partial in sums:
                    if not _possible(two, partial):
                        continue
                    forward = Work(moves=[Move(meta, one, two)])
                    gradient = tuple(Partial() if s else p for s, p in zip(partial, two, strict=True))
                    back = Work(moves=[Move(meta, gradient, normal(one))] if trained else [])
                    yield Strategy((State(one),), (State(two, partial),), forward, back, moved=True)


def _within(trial: Trial, step: Step) -> bool:
    return len(trial.outputs) == len(step.outputs) and all(
        one is None or meta is None or fits(meta, one, TRIED)
        for one, meta in zip(trial.outputs, step.outputs, strict=True)
    )


def _demands(step: Step, ref: Ref) -> Iterator[State]:
    for strategy in step.strategies:
        for one, state in zip(step.inputs, strategy.inputs, strict=True):
            if one == ref:
                yield state


def _possible(placed: Placed, partial: tuple[bool, ...]) -> bool:
    """Whether the gradient of a tensor can be a partial sum on some axes: it must be replicated there."""
    return all(isinstance(one, Replicate) for one, some in zip(placed, partial, strict=True) if some)


def targets(meta: Meta | None, placed: Placed) -> list[Placed]:
    """Returns the placements to which a plan can redistribute a tensor over `tp`; not the present one."""
    assert meta is not None
    dims = [dim for dim in range(1, len(meta.shape)) if meta.shape[dim] % TRIED == 0 and meta.shape[dim] > 1]
    found: list[Placed] = [(one,) for one in (Replicate(), *(Shard(dim) for dim in dims))]
    return [one for one in found if one != placed]


def parameter_placements(meta: Meta | None) -> list[Placed]:
    """Returns the placements of a parameter over `tp`. Kernels of convolutions are sharded by channels only."""
    assert meta is not None
    dims = range(len(meta.shape) if len(meta.shape) < 4 else 2)
    split = [Shard(dim) for dim in dims if meta.shape[dim] % TRIED == 0 and meta.shape[dim] > 1]
    return [(one,) for one in (Replicate(), *split)]


def _crossed(source: tuple[str, ...], target: tuple[str, ...]) -> list[tuple[str, str]]:
    """Returns the modules that a tensor leaves and enters on its way between two calls."""
    common = 0
    while common < min(len(source), len(target)) and source[common] == target[common]:
        common += 1
    return [("leave", path) for path in reversed(source[common:])] + [("enter", path) for path in target[common:]]


def _parents(path: str) -> tuple[str, ...]:
    words = path.split(".")
    return tuple(".".join(words[: place + 1]) for place in range(len(words) - 1))


def _moved(ref: Ref, places: dict[int, int]) -> Ref:
    return Ref(places[ref.node], ref.index)

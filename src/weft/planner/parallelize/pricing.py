"""Seconds and bytes of strategies on a mesh, from a hardware file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod
from typing import NamedTuple, Protocol

from torch.distributed.tensor import Partial, Shard

from weft.config.mesh import Schedule
from weft.planner.communication import Group, Links
from weft.planner.compute import BACKWARD_EFFICIENCY, Costs
from weft.planner.hardware import Hardware
from weft.planner.parallelize.graph import Meta
from weft.planner.parallelize.solve import Option
from weft.planner.parallelize.solve import State as Offer
from weft.planner.parallelize.space import Space
from weft.planner.parallelize.steps import Step, Strategy
from weft.planner.parallelize.strategies import ATTENTION, TRIED, State
from weft.planner.parallelize.watch import Move, Placed, Work

STATE_COPIES = 4.0  # parameter, gradient and the two moments of Adam
TINY = 1e-9  # seconds by which a redistribution or a sharded parameter is worse, so that ties are broken the same way
DTYPES = ("bfloat16", "float16", "float32", "float64")
ROUNDS = (1, 2, 4, 8)  # micro-batches of a call with stages, in multiples of the number of pipeline ranks


class Split(NamedTuple):
    """A step on a data rank: the number of micro-batches, and the rows of each."""

    micro_batches: int
    rows: float


class Steps(Protocol):
    """The steps for which plans are compared."""

    @property
    def widening(self) -> float:
        """Bytes of a stored parameter and its gradient, for each byte in the computation."""
        ...

    @property
    def stages(self) -> bool:
        """Whether plans may have pipeline stages."""
        ...

    def splits(self, rows: int, pp: int, dp: int, schedule: Schedule) -> list[Split]:
        """Returns the ways to split the rows of a step that plans may choose from; none if the schedule has none."""
        ...


class Calls:
    """Steps that are calls of the module with all rows of the example inputs."""

    widening: float = 1.0
    stages: bool = True

    def splits(self, rows: int, pp: int, dp: int, schedule: Schedule) -> list[Split]:
        """Returns one micro-batch without stages, and several numbers of micro-batches with stages."""
        if pp == 1:
            return [Split(1, rows / dp)]
        return [Split(pp * each, rows / (dp * pp * each)) for each in ROUNDS if rows % (dp * pp * each) == 0]


@dataclass(frozen=True)
class Setting:
    """What a plan decides for the model as a unit.

    Attributes:
        dp: number of ranks of the data axis.
        tp: number of ranks of the tensor axis.
        tp2: number of ranks of the second tensor axis.
        recompute: whether repeated blocks are recomputed in backward.
        shard: whether parameters are sharded over `dp`.
        reshard: whether gathered parameters are freed after forward, and gathered again for backward.
        pp: number of pipeline ranks. With several, parameters are gathered and gradients reduced once in a step.
        split: micro-batches of a step; None: one, with all rows.
        widening: see `Steps`.
    """

    dp: int
    tp: int
    recompute: bool = False
    shard: bool = True
    reshard: bool = True
    pp: int = 1
    split: Split | None = None
    widening: float = 1.0
    tp2: int = 1


@dataclass
class Parts:
    """Seconds and bytes of a strategy, for all calls of its step.

    Attributes:
        compute: seconds of computation.
        tp: seconds of collectives over the tensor axes.
        dp: seconds of collectives over `dp`.
        states: bytes of a parameter, its gradient and the moments of Adam.
        activations: bytes that are saved for backward, of one micro-batch.
        forward: seconds of `compute` and `tp` in forward passes.
        weights: seconds of `compute` for gradients of parameters.
    """

    compute: float = 0.0
    tp: float = 0.0
    dp: float = 0.0
    states: float = 0.0
    activations: float = 0.0
    forward: float = 0.0
    weights: float = 0.0

    def __add__(self, other: Parts) -> Parts:
        return Parts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


class Prices:
    """Prices of the strategies of a space for one setting.

    Args:
        space: the steps.
        hardware: the hardware file.
        setting: mesh and memory options.
        dtype: name of the dtype of most floating-point operations.
        first: the strategies on the axis `tp`, if those on `tp2` are priced. Without them, all ranks of `tp2` do the
            same.
    """

    def __init__(
        self,
        space: Space,
        hardware: Hardware,
        setting: Setting,
        dtype: str,
        first: Sequence[Strategy] | None = None,
    ):
        self.space, self.setting = space, setting
        self.links, self.costs = Links(hardware), Costs(hardware, dtype)
        self.blocks = {repeat.paths[0] for repeat in space.graph.repeats}
        split = setting.split or Split(1, space.graph.rows / setting.dp)
        self.calls = split.micro_batches  # of each operation in a step
        self.pieces = space.graph.rows / split.rows  # of the batch: for each data rank and micro-batch
        self.first, self.dp = first, Group(setting.dp, setting.tp * setting.tp2)
        self.axes = [(setting.tp, Group(setting.tp, setting.tp2))]  # the tensor axes: sizes and groups
        self.axes += [] if first is None else [(setting.tp2, Group(setting.tp2))]

    @cached_property
    def rows(self) -> list[bool]:
        """For each step, whether its tensors have the rows of the batch, so that `dp` shards them."""
        found: list[bool] = []
        for step in self.space.steps:
            if step.kind == "input":
                meta = step.outputs[0]
                found.append(meta is not None and bool(meta.shape) and meta.shape[0] % self.setting.dp == 0)
            else:
                found.append(any(found[ref.node] for ref in step.inputs))
        return found

    def options(self, place: int) -> list[tuple[Option, Strategy]]:
        """Returns the options of a step on this mesh, with their strategies."""
        step, rows = self.space.steps[place], self.rows
        tensors = [(self.space.meta(ref), rows[ref.node]) for ref in step.inputs]
        tensors += [(meta, rows[place]) for meta in step.outputs]
        return [
            (self._option(place, step, strategy), strategy)
            for strategy in step.strategies
            if self._possible(tensors, self.chosen(place, strategy))
        ]

    def chosen(self, place: int, strategy: Strategy) -> list[Strategy]:
        """Returns the strategy of a step on each tensor axis."""
        return [strategy] if self.first is None else [self.first[place], strategy]

    def _possible(self, tensors: Sequence[tuple[Meta | None, bool]], chosen: Sequence[Strategy]) -> bool:
        """Whether the axes divide what they shard of tensors, of which some have the rows of the batch."""
        for place, (meta, rows) in enumerate(tensors):
            states = [(*one.inputs, *one.outputs)[place] for one in chosen]
            if meta is not None and not self._divides(meta, states, rows=rows):
                return False
        # Where one axis is redistributed, gradients are, too: partial sums over the other axis would be added up.
        moved = [one.moved for one in chosen]
        return moved in ([True, True], [True]) or not any(
            state is not None and state.partial[0]
            for one in chosen
            if any(moved) and not one.moved
            for state in one.outputs
        )

    def _divides(self, meta: Meta, states: Sequence[State | None], *, rows: bool) -> bool:
        ranks: dict[int, int] = {}
        for state, (size, _) in zip(states, self.axes, strict=True):
            if state is not None and isinstance(one := state.forward[0], Shard):
                if size == 1:
                    return False  # nothing to shard
                ranks[one.dim] = ranks.get(one.dim, 1) * size
        return all(
            dim < len(meta.shape) and meta.shape[dim] / (self.pieces if rows and not dim else 1) % size == 0
            for dim, size in ranks.items()
        )

    def inside(self, step: Step) -> bool:
        """Whether a step is in a repeated block."""
        return any(path in self.blocks for path in step.node.modules) or step.node.name in self.blocks

    def _option(self, place: int, step: Step, strategy: Strategy) -> Option:
        parts = self.parts(place, strategy)
        return Option(
            tuple(Offer(state.forward, state.partial) for state in strategy.inputs),
            tuple(None if state is None else Offer(state.forward, state.partial) for state in strategy.outputs),
            parts.compute + parts.tp + parts.dp + TINY * strategy.moved,
            parts.states + parts.activations * min(self.setting.pp, self.calls),  # of the micro-batches in flight
        )

    def parts(self, place: int, strategy: Strategy) -> Parts:
        """Returns the seconds and bytes of a strategy of a step."""
        step = self.space.steps[place]
        rows, again = self.rows[place], self.setting.recompute and self.inside(step)
        chosen = self.chosen(place, strategy)
        forward, backward = [one.forward for one in chosen], [one.backward for one in chosen]
        if step.kind == "parameter":
            found = self.parameter(step, [one.outputs[0] for one in chosen], again=again)
        else:
            repeats = 2 if again else 1
            ahead, moved = self.seconds(step, forward, step.full_forward, rows), self.moved(step, chosen, forward, rows)
            back = self.seconds(step, backward, step.full_backward, rows, back=True)
            found = Parts(
                compute=self.calls * (ahead * repeats + back),
                tp=self.calls * (moved * repeats + self.moved(step, chosen, backward, rows)),
                activations=0.0 if again else self.saved(step, chosen, rows),
                forward=self.calls * (ahead + moved),
                weights=self.calls * back * self.share_of_weights(step),
            )
        return Parts(*(getattr(found, one.name) * step.node.times for one in fields(found)))

    # ---- operations

    def share_of_weights(self, step: Step) -> float:
        """Returns the fraction of a backward pass for gradients of parameters: a product has one for each input."""
        steps = self.space.steps
        trained = [steps[ref.node].kind for ref in step.inputs if steps[ref.node].trained[ref.index]]
        return trained.count("parameter") / len(trained) if trained and step.full_backward.products else 0.0

    def share(self, local: Sequence[float], full: float) -> float:
        """Returns the fraction of work that one rank has.

        Args:
            local: for each tensor axis, the work on the mesh of trials.
            full: the work without sharding.
        """
        found = 1.0
        for one, (size, _) in zip(local, self.axes, strict=True):
            split = min(1.0, max(0.0, (1 - one / full) / (1 - 1 / TRIED))) if full else 0.0
            found *= 1 - split * (1 - 1 / size)
        return found

    def seconds(self, step: Step, works: Sequence[Work], full: Work, rows: bool, *, back: bool = False) -> float:
        """Returns the seconds of one call of a step on one rank, whose work on each tensor axis is given."""
        pieces = self.pieces if rows else 1
        flops = full.flops * self.share([one.flops for one in works], full.flops) / pieces
        moved = self.costs.moved(full.bytes * self.share([one.bytes for one in works], full.bytes) / pieces)
        moved = max(moved, full.calls * self.costs.launch)
        if not flops:
            return moved
        if str(step.node.target) == ATTENTION:
            rate = self.costs.peak * self.costs.device.attention_efficiency * (BACKWARD_EFFICIENCY if back else 1.0)
            return max(flops / rate, moved)
        size = (flops / 2 / max(1, full.products)) ** (1 / 3)
        rate = self.costs.rates[self.costs.dtype] * size / (size + self.costs.half)
        return max(flops / rate, moved)

    def moved(self, step: Step, chosen: Sequence[Strategy], works: Sequence[Work], rows: bool) -> float:
        """Returns the seconds of the redistributions of one call of a step."""
        return sum(seconds for _, seconds in self.moves(step, chosen, works, rows))

    def moves(
        self, step: Step, chosen: Sequence[Strategy], works: Sequence[Work], rows: bool
    ) -> Iterator[tuple[Move, float]]:
        """Yields the redistributions of one call of a step, and the seconds of each."""
        metas = [*(self.space.meta(ref) for ref in step.inputs), *step.outputs]
        for axis, work in enumerate(works):
            for move in work.moves:
                held = 1.0
                if self.first is not None:  # each rank has a part of the tensor, as the other axis shards it
                    other = chosen[1 - axis]
                    states = zip(metas, (*other.inputs, *other.outputs), strict=True)
                    state = next((state for meta, state in states if meta == move.meta), None)
                    held = self.held(state.forward, 1 - axis) if state is not None else 1.0
                yield move, self.move(move, rows, axis, held)

    def move(self, move: Move, rows: bool, axis: int = 0, held: float = 1.0) -> float:
        """Returns the seconds of a redistribution over a tensor axis, of a fraction `held` of the tensor."""
        ranks, group = self.axes[axis]
        size = move.meta.bytes * held / (self.pieces if rows else 1)
        one, two = move.source[0], move.target[0]
        if isinstance(one, Shard):
            if isinstance(two, Shard):
                return self.links.seconds("all_to_all", size / ranks, group)
            return self.links.seconds("all_gather", size, group)
        if isinstance(one, Partial) and not isinstance(two, Partial):
            return self.links.seconds("reduce_scatter" if isinstance(two, Shard) else "all_reduce", size, group)
        return 0.0

    def saved(self, step: Step, chosen: Sequence[Strategy], rows: bool) -> float:
        """Returns the bytes that a rank keeps of a step's results until backward."""
        if step.kind in ("enter", "leave") and not any(one.moved for one in chosen):
            return 0.0
        total = step.extra * self.share([one.forward.bytes for one in chosen], step.full_forward.bytes)
        for index in step.kept:
            meta = step.outputs[index]
            if meta is not None and step.kind != "buffer":
                total += meta.bytes * self.held_of([one.outputs[index] for one in chosen])
        return total / (self.pieces if rows else 1)

    def held(self, placed: Placed, axis: int = 0) -> float:
        """Returns the fraction of a tensor that one rank of a tensor axis has."""
        return 1 / self.axes[axis][0] if isinstance(placed[0], Shard) else 1.0

    def held_of(self, states: Sequence[State | None]) -> float:
        """Returns the fraction of a tensor that one rank has, from its states on the tensor axes."""
        return prod(self.held(one.forward, axis) for axis, one in enumerate(states) if one is not None)

    # ---- parameters

    def parameter(self, step: Step, states: Sequence[State | None], *, again: bool) -> Parts:
        """Returns the collectives of a parameter in a step of training, and its bytes on a rank."""
        meta, trained = step.outputs[0], step.trained[0]
        assert meta is not None
        size = meta.bytes * self.held_of(states)
        stored = size * self.setting.widening
        sharded, staged = self.setting.shard and bool(meta.shape), self.setting.pp > 1
        calls = 1 if staged else self.calls
        found = Parts()
        sums = [group for state, (_, group) in zip(states, self.axes, strict=True) if state and state.partial[0]]
        if trained:
            found.tp = sum(self.links.seconds("all_reduce", stored, group) for group in sums) * calls
        if sharded:
            kept = trained and not self.setting.reshard
            gathers = 1 if staged else calls * (1 + again + (trained and not kept))
            found.dp = self.links.seconds("all_gather", size, self.dp) * gathers
            found.activations = size if kept and not again and self.setting.dp > 1 else 0.0
        if trained:
            found.dp += self.links.seconds("reduce_scatter" if sharded else "all_reduce", stored, self.dp) * calls
        found.states = stored * (STATE_COPIES if trained else 1.0) / (self.setting.dp if sharded else 1)
        return found

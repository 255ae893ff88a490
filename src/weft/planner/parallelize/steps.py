"""Defines the steps of a space of plans, and the strategies of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from weft.planner.parallelize.graph import Meta, Node, Ref
from weft.planner.parallelize.strategies import Placed, State, Trial, Work


class Strategy(NamedTuple):
    """One way to run a node.

    Attributes:
        inputs: how its inputs are placed.
        outputs: how its outputs are placed; None for a result that is no tensor.
        forward: the work of a rank of the mesh of trials in the forward pass.
        backward: likewise, in backward.
        moved: whether a plan redistributes here.
    """

    inputs: tuple[State, ...]
    outputs: tuple[State | None, ...]
    forward: Work
    backward: Work
    moved: bool = False


@dataclass
class Step:
    """A node of the space: an operation, a parameter, an input, the outputs, or a place for a redistribution.

    Attributes:
        node: the node of the graph; for a place of redistribution, one with the name of the module.
        inputs: the tensors that it takes: outputs of earlier steps.
        outputs: the tensors that it returns.
        trained: for each output, whether it has a gradient.
        strategies: the ways to run it.
        kept: numbers of the outputs that are saved for backward.
        full_forward: the work without sharding, in the forward pass.
        full_backward: likewise, in backward.
        extra: bytes of other tensors that are saved for backward, without sharding.
        forwards: for each output, the placements that it can have.
        key: the key of trials.
    """

    node: Node
    inputs: list[Ref]
    outputs: tuple[Meta | None, ...]
    trained: tuple[bool, ...]
    strategies: list[Strategy] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    full_forward: Work = field(default_factory=Work)
    full_backward: Work = field(default_factory=Work)
    extra: float = 0.0
    forwards: list[set[Placed]] = field(default_factory=list)
    key: object = None
    trials: list[tuple[tuple[Placed, ...], Trial]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """`parameter`, `buffer`, `input`, `op`, `output`, `enter` or `leave`."""
        return self.node.kind

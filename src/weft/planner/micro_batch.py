"""The seconds and the parameters of one micro-batch on a rank with all layers, which many plans share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from weft.planner.units import Job, Unit

Kind = tuple[bool, bool, bool]  # experts, sliding window, multi-token prediction
Times = tuple[float, float, float, Counter[Kind]]


@dataclass(frozen=True)
class Size:
    """The parameters of a piece after `tp` and `ep`: those outside of experts, and those of experts."""

    others: int
    experts: int

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.others + self.experts


@dataclass(frozen=True)
class Pieces:
    """The seconds of one micro-batch on a rank with all layers, and what they depend on.

    Attributes:
        units: the unit of each kind of block.
        sizes: the parameters of each kind of block.
        kinds: the kind of each layer.
        ends: units of the embedding and of the head.
        root: parameters that are gathered before all others: of the embedding and, if they are not FSDP2 units
            (`embeds_at_end`), of the head.
        head: parameters of the head, if it is an FSDP2 unit.
        saved: bytes that a micro-batch keeps for backward in each kind of block.
        extra: further bytes of activations that exist while any block's backward runs.
    """

    job: Job
    units: dict[Kind, Unit]
    sizes: dict[Kind, Size]
    kinds: list[Kind]
    ends: tuple[Unit, Unit]
    root: Size
    head: Size
    saved: dict[Kind, float]
    extra: float

    @cached_property
    def counts(self) -> Counter[Kind]:
        """Number of layers of each kind."""
        return Counter(self.kinds)

    @cached_property
    def passes(self) -> tuple[float, float, float]:
        """Seconds of forward and of backward of all layers, embedding and head, and of collectives in both."""
        units = [(unit, self.counts[kind]) for kind, unit in self.units.items()] + [(end, 1) for end in self.ends]
        found = [(*seconds_of(unit)[:2], waits_of(unit), number) for unit, number in units]
        forward, backward, waits = (sum(one[place] * one[3] for one in found) for place in range(3))
        return forward, backward, waits

    @cached_property
    def blocks(self) -> Size:
        """Parameters of all layers."""
        sizes = [(self.sizes[kind], number) for kind, number in self.counts.items()]
        return Size(sum(one.others * n for one, n in sizes), sum(one.experts * n for one, n in sizes))

    @cached_property
    def all_saved(self) -> float:
        """Bytes that a micro-batch keeps in all layers."""
        return sum(number * self.saved[kind] for kind, number in self.counts.items())


def seconds_of(unit: Unit) -> tuple[float, float, float]:
    """Returns seconds of forward, of backward with recomputation, and of gradients of weights, with collectives."""
    passes = unit.passes
    return (
        passes.forward + sum(unit.forward.values()),
        passes.backward + passes.recompute + sum(unit.backward.values()),
        passes.backward_weight,
    )


def waits_of(unit: Unit) -> float:
    """Returns the seconds of collectives for which the computation of a unit waits."""
    return sum(unit.forward.values()) + sum(unit.backward.values())

"""Times of collectives on levels of links, by the alpha-beta model with hierarchical rings and trees.

A group of ranks is spread evenly over nodes, racks and so on. A ring passes through all ranks of a group; it crosses
slow links as rarely as possible, and uses the adapters of all its ranks in a node at once, as NCCL's rings do
(Thakur et al., 2005; NCCL's tuning model).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.config.mesh import MeshShape
from weft.planner.hardware import Collective, Hardware, LevelSection


@dataclass(frozen=True)
class Group:
    """The ranks of a process group: `first`, `first + stride`, `first + 2 * stride`, ...

    Attributes:
        ranks: number of ranks.
        stride: distance of neighboring ranks of the group in the job.
    """

    ranks: int
    stride: int = 1

    def within(self, devices: int | None) -> int:
        """Returns how many of the ranks are on one group of `devices` adjacent devices; None: on all devices."""
        return self.ranks if devices is None else max(1, min(self.ranks, devices // self.stride))


def mesh_groups(mesh: MeshShape) -> dict[str, Group]:
    """Returns the group of each axis of a mesh.

    The key `fsdp` is the group over which parameters are sharded, `efsdp` that for the parameters of experts. The ranks
    of an outer axis are as far apart as the product of the inner axes (`config.mesh.AXES`).
    """
    shard = mesh.tp * mesh.fsdp
    return {
        "tp": Group(mesh.tp),
        "cp": Group(mesh.cp, mesh.tp),
        "ep": Group(mesh.ep, mesh.tp),
        "efsdp": Group(mesh.fsdp // mesh.ep, mesh.tp * mesh.ep),
        "fsdp": Group(mesh.fsdp, mesh.tp),
        "dp_replicate": Group(mesh.dp_replicate, shard),
        "pp": Group(mesh.pp, shard * mesh.dp_replicate),
    }


@dataclass(frozen=True)
class _Crossing:
    """The links of one level that a group uses.

    Attributes:
        level: the level.
        inside: number of the group's ranks in a group of the level below; all their links work in parallel.
        outside: number of the group's ranks in a group of this level.
    """

    level: LevelSection
    inside: int
    outside: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second of one rank's link."""
        level = self.level
        parts = self.outside / self.inside
        return level.bandwidth_gb_s * 1e9 * level.efficiency * parts**-level.congestion

    @property
    def latency(self) -> float:
        """Seconds of one step."""
        return self.level.latency_us * 1e-6


class Links:
    """The links of a machine.

    >>> from weft.planner.hardware import load_hardware
    >>> links = Links(load_hardware("h100-sxm"))
    >>> links.seconds("all_gather", 1e9, Group(8)) < links.seconds("all_gather", 1e9, Group(16))
    True
    """

    def __init__(self, hardware: Hardware):
        self.hardware = hardware
        self._known: dict[tuple[str, float, Group], float] = {}

    def seconds(self, kind: Collective, size: float, group: Group) -> float:
        """Returns the seconds of a collective. A measured collective of this kind and group takes precedence.

        Args:
            size: bytes. all_gather, reduce_scatter and all_reduce: of the full tensor; all_to_all: of one rank's
                tensor; send: of the message.
            group: the ranks that communicate. send: the time is that of the slowest pair of neighbors.
        """
        if group.ranks == 1 or not size:
            return 0.0
        key = (kind, size, group)
        if key not in self._known:
            self._known[key] = self._seconds(kind, size, group)
        return self._known[key]

    def _seconds(self, kind: Collective, size: float, group: Group) -> float:
        nodes = -(-group.ranks // group.within(self.hardware.node))
        line = self.hardware.measured_collectives.get((kind, group.ranks, nodes))
        if line is not None:
            return line.latency_us * 1e-6 + size / (line.bandwidth_gb_s * 1e9)
        crossings = self._crossings(group)
        if kind == "send":
            return max(crossing.latency + size / crossing.bandwidth for crossing in crossings)
        if kind == "all_to_all":
            return _all_to_all(crossings, size, group.ranks)
        ring = _ring(crossings, size, group.ranks)
        return ring if kind != "all_reduce" else min(2 * ring, _tree(crossings, size, group.ranks))

    def _crossings(self, group: Group) -> list[_Crossing]:
        found, inside = [], 1
        for level in self.hardware.levels:
            outside = group.within(level.devices)
            if outside > inside:
                found.append(_Crossing(level, inside, outside))
                inside = outside
        if inside < group.ranks:  # more devices than the last level has: its links also connect its groups
            found.append(_Crossing(self.hardware.levels[-1], inside, group.ranks))
        return found


def _transfer(crossings: list[_Crossing], size: float, ranks: int) -> float:
    """Returns the seconds that the slowest links need for (ranks - 1) / ranks of a tensor's bytes."""
    return max(size * (ranks - 1) / ranks / (one.bandwidth * one.inside) for one in crossings)


def _ring(crossings: list[_Crossing], size: float, ranks: int) -> float:
    """Returns the seconds of an all-gather or a reduce-scatter by a ring, which has `ranks - 1` steps."""
    steps, latency = ranks - 1, 0.0
    for place, one in enumerate(crossings):
        last = place == len(crossings) - 1
        hops = steps if last else ranks // one.inside - ranks // one.outside
        latency += hops * one.latency
        steps -= hops
    return _transfer(crossings, size, ranks) + latency


def _tree(crossings: list[_Crossing], size: float, ranks: int) -> float:
    """Returns the seconds of an all-reduce by a double binary tree (Sanders et al., 2009) over the outermost level."""
    *inner, outer = crossings
    steps = sum((one.outside // one.inside - 1) * one.latency for one in inner)
    steps += math.ceil(math.log2(outer.outside / outer.inside)) * outer.latency
    return 2 * (_transfer(crossings, size, ranks) + steps)


def _all_to_all(crossings: list[_Crossing], size: float, ranks: int) -> float:
    """Returns the seconds of an all-to-all, in which a rank sends 1 / ranks of its tensor to each rank."""
    transfer = max(size * (one.outside - one.inside) / ranks / one.bandwidth for one in crossings)
    return transfer + sum(one.latency for one in crossings) * math.ceil(math.log2(ranks))

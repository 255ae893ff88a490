"""Measures collectives between ranks, and fits lines of time over bytes to them (the alpha-beta model).

Groups are those of meshes: `nodes` hosts with the same number of adjacent ranks on each. All groups of a kind work at
the same time, as in training, and the slowest counts. A matrix product precedes each collective, as in training, and
its time is subtracted: after computation, ranks are not in step, threads wake up and caches have other data, so that a
collective takes longer than one of many in a row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist

from weft.config.nearest_mesh import divisors
from weft.parallel.collectives import ALL_GATHER
from weft.parallel.ranks import all_gather_object
from weft.planner.hardware import Collective, MeasuredCollective
from weft.planner.measure import call_seconds, lower_quartile, synchronize

KINDS: tuple[Collective, ...] = get_args(Collective)
SIZES = {"cpu": tuple(4**power for power in range(5, 13)), "cuda": tuple(4**power for power in range(6, 15))}  # bytes
CHUNKS = 5  # a measurement is the lower quartile of the mean seconds of this many chunks of calls
# PyTorch 2.13 has new names for two collectives; see `collectives.ALL_GATHER`.
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
LEAST_LATENCY = 0.1  # microseconds; hardware files need a positive number
FASTEST = 1e5  # GB/s, the most that hardware files accept
CALLS = CHUNKS + 2  # of a collective, at least
LEAST_SIZES = 4  # of a line
MOST_CALLS = 40  # of a chunk
PRODUCT = {"cpu": 512, "cuda": 4096}  # size of the matrix products beside which, or after which, a collective runs
BESIDE = 3  # all-reduces beside which matrix products run
MOST_SLOWDOWN = 1000.0  # that hardware files accept: computation waits
LEAST_SECONDS = 1e-7  # of a collective: a difference of two measurements may be negative


@dataclass(frozen=True)
class GroupSize:
    """The ranks of a group: `ranks` in all, on `nodes` hosts."""

    ranks: int
    nodes: int


@dataclass(frozen=True)
class LinkMeasurement:
    """Seconds of one collective by bytes, and the line that was fitted to them.

    Attributes:
        seconds: seconds by bytes, of the slowest group.
        latency: seconds of a collective of no bytes.
        per_byte: seconds of each byte.
        error: root mean square of the line's relative errors.
    """

    kind: Collective
    group: GroupSize
    seconds: dict[int, float]
    latency: float
    per_byte: float
    error: float

    @property
    def row(self) -> MeasuredCollective:
        """The entry of a hardware file."""
        size = {"ranks": self.group.ranks, "nodes": self.group.nodes}
        gb_s = min(FASTEST, 1e-9 / self.per_byte) if self.per_byte else FASTEST
        return MeasuredCollective(kind=self.kind, **size, latency_us=self.latency * 1e6, bandwidth_gb_s=gb_s)


def group_sizes(ranks: int, per_host: int) -> list[GroupSize]:
    """Returns the sizes of groups that are measured: every divisor of the hosts by every divisor of a host's ranks."""
    hosts = ranks // per_host
    return [
        GroupSize(nodes * each, nodes) for nodes in divisors(hosts) for each in divisors(per_host) if nodes * each > 1
    ]


def groups_of(size: GroupSize, ranks: int, per_host: int) -> list[list[int]]:
    """Returns the groups of a size into which the ranks are divided."""
    each = size.ranks // size.nodes
    return [
        [host * per_host + local for host in range(first, first + size.nodes) for local in range(at, at + each)]
        for first in range(0, ranks // per_host, size.nodes)
        for at in range(0, per_host, each)
    ]


def measure_links(
    device: torch.device,
    per_host: int,
    seconds: float,
    *,
    progress: Callable[[str], None] = lambda what: None,
) -> list[LinkMeasurement]:
    """Measures all collectives on all sizes of groups, for about `seconds` seconds. All ranks must call it.

    Args:
        per_host: number of ranks on each host; more than 1, or else all ranks.
        progress: called with the name of the next measurement.
    """
    ranks = dist.get_world_size()
    sizes, found = group_sizes(ranks, per_host), []
    budget = seconds / (len(sizes) * len(KINDS) * len(SIZES[device.type]))
    one, other = (torch.randn(PRODUCT[device.type], PRODUCT[device.type], device=device) for _ in range(2))
    for size in sizes:
        group, _ = dist.new_subgroups_by_enumeration(groups_of(size, ranks, per_host))
        assert isinstance(group, dist.ProcessGroup)
        for kind in KINDS:
            progress(f"{kind} on {size.ranks} ranks")
            times: dict[int, float] = {}
            for count in SIZES[device.type]:
                late = 4 * max(times.values(), default=0.0) * CALLS > budget * len(SIZES[device.type])
                if late and len(times) >= LEAST_SIZES:  # the next size would take longer than all sizes may
                    break
                act = _collective(kind, count, group, device)
                times[count] = _slowest(act, lambda: torch.mm(one, other), device, budget)
            latency, per_byte, error = fit_line(times)
            found.append(LinkMeasurement(kind, size, times, latency, per_byte, error))
    return found


def _collective(kind: Collective, size: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], Any]:
    """Returns a function that runs a collective once. `size` is in bytes, as in `communication.Links.seconds`."""
    ranks = dist.get_world_size(group)
    count = max(1, size // 4 // ranks) * ranks
    full, other = (torch.zeros(count, device=device) for _ in range(2))
    part = torch.zeros(count // ranks, device=device)
    if kind == "all_gather":
        return lambda: ALL_GATHER(full, part, group=group)
    if kind == "reduce_scatter":
        return lambda: REDUCE_SCATTER(part, full, group=group)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(full, group=group)
    if kind == "all_to_all":
        return lambda: dist.all_to_all_single(other, full, group=group)
    members, own = dist.get_process_group_ranks(group), dist.get_rank(group)
    to, source = members[(own + 1) % ranks], members[own - 1]

    def pass_on() -> None:
        sent = dist.P2POp(dist.isend, full, to, group)
        received = dist.P2POp(dist.irecv, other, source, group)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()

    return pass_on


def _slowest(act: Callable[[], Any], compute: Callable[[], Any], device: torch.device, budget: float) -> float:
    """Returns the seconds of a collective after computation, on the slowest rank. All ranks make as many calls."""

    def both() -> None:
        compute()
        act()

    for _ in range(2):  # the first call may connect ranks
        first = _mean(both, device, 1)
    longest = max(all_gather_object(first))
    calls = max(1, min(MOST_CALLS, int(budget / CHUNKS / longest / 2)))
    pairs = [(_mean(both, device, calls), _mean(compute, device, calls)) for _ in range(CHUNKS)]
    found = lower_quartile([one for one, _ in pairs]) - lower_quartile([other for _, other in pairs])
    return max(LEAST_SECONDS, *all_gather_object(found))


def _mean(act: Callable[[], Any], device: torch.device, calls: int) -> float:
    dist.barrier()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        act()
    synchronize(device)
    return (time.perf_counter() - began) / calls


def fit_line(times: dict[int, float]) -> tuple[float, float, float]:
    """Fits `latency + bytes * per_byte` to seconds by bytes, with the smallest squares of relative errors.

    Returns:
        The latency in seconds and the seconds of each byte, which are not negative, and the root mean square of the
        relative errors.
    """
    rows = [(1 / seconds, size / seconds) for size, seconds in times.items()]  # each row should give 1
    aa, ab, bb = (sum(x[i] * x[j] for x in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(x[i] for x in rows) for i in (0, 1))
    latency, per_byte = (a * bb - b * ab) / (aa * bb - ab * ab), (b * aa - a * ab) / (aa * bb - ab * ab)
    if latency < 0:
        latency, per_byte = 0.0, b / bb
    if per_byte < 0:
        latency, per_byte = a / aa, 0.0
    errors = [latency * one + per_byte * other - 1 for one, other in rows]
    return latency, per_byte, statistics.mean(error**2 for error in errors) ** 0.5


def measure_slowdown(device: torch.device, seconds: float) -> float:
    """Returns by which fraction computation is slower while an all-reduce over all ranks runs; at most MOST_SLOWDOWN.

    Matrix products run beside all-reduces for longer than these last, and both are waited for: what both take more than
    the products alone is the time that the all-reduces cost. On a CPU without further cores, this is all of their time.
    """
    size = PRODUCT[device.type]
    one, other = (torch.randn(size, size, device=device) for _ in range(2))
    tensor = torch.zeros(max(SIZES[device.type]) // 4, device=device)
    product = call_seconds(lambda: torch.mm(one, other), device, seconds / 4)
    collective = max(all_gather_object(call_seconds_together(lambda: dist.all_reduce(tensor), device)))
    calls = max(all_gather_object(max(2, min(1000, int(2 * BESIDE * collective / product)))))
    lost = []

    def beside() -> None:
        works: list[Any] = [dist.all_reduce(tensor, async_op=True) for _ in range(BESIDE)]
        for _ in range(calls):
            torch.mm(one, other)
        for work in works:
            work.wait()

    for _ in range(CHUNKS):
        alone = _mean(lambda: torch.mm(one, other), device, calls) * calls
        waited = _mean(lambda: dist.all_reduce(tensor), device, BESIDE) * BESIDE
        lost.append((_mean(beside, device, 1) - alone) / waited)
    share = min(max(0.0, statistics.mean(all_gather_object(statistics.median(lost)))), 1 - 1 / (1 + MOST_SLOWDOWN))
    return share / (1 - share)


def call_seconds_together(act: Callable[[], Any], device: torch.device) -> float:
    """Returns the mean seconds of three calls of a collective."""
    act()
    return _mean(act, device, 3)


def fitted_levels(found: Sequence[LinkMeasurement], per_host: int) -> list[dict[str, Any]]:
    """Returns latency and bandwidth of the levels of links: within a host, and between hosts if there are several.

    They follow from the times of all-gathers and reduce-scatters of the largest groups, as `planner.communication`
    computes them, and predict groups that were not measured.

    Args:
        per_host: number of ranks on each host.
    """
    rings = [one for one in found if one.kind in ("all_gather", "reduce_scatter")]
    within = [one for one in rings if one.group.nodes == 1]
    ranks = max(one.group.ranks for one in within)
    host = {"name": "host", **_level(within, ranks, 1, ranks - 1)}
    across = [one for one in rings if one.group.nodes > 1]
    if not across:
        return [host]
    ranks, nodes = max(one.group.ranks for one in across), max(one.group.nodes for one in across)
    network = {"name": "network", **_level(across, ranks, ranks // nodes, nodes - 1)}
    inner = host["latency_us"] * (ranks - nodes) / (nodes - 1)  # of the same ring, within hosts
    network["latency_us"] = max(LEAST_LATENCY, network["latency_us"] - inner)
    return [{**host, "devices": per_host}, network]


def _level(found: Sequence[LinkMeasurement], ranks: int, inside: int, steps: int) -> dict[str, Any]:
    """Returns the values of a level from rings of `ranks` ranks that have `steps` steps on its links.

    Args:
        inside: number of the group's ranks on each host, whose links work in parallel.
    """
    largest = [one for one in found if one.group.ranks == ranks]
    latency = statistics.mean(one.latency for one in largest) / steps
    per_byte = statistics.mean(one.per_byte for one in largest) * inside * ranks / (ranks - 1)
    gb_s = min(FASTEST, 1e-9 / per_byte) if per_byte else FASTEST
    return {"latency_us": max(LEAST_LATENCY, latency * 1e6), "bandwidth_gb_s": gb_s, "efficiency": 1.0}

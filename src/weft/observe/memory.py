"""Computes from a trace the memory by category (gradients, activations, ...) over time, and draws it as an SVG."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.formatting import byte_size
from weft.observe.charts import Scale, ticks
from weft.observe.report import render
from weft.observe.trace import Interval, Trace, union

COLORS = {
    "parameters": "#4269d0",
    "optimizer state": "#9c6b4e",
    "gradients": "#efb118",
    "gathered parameters": "#97bbf5",
    "activations": "#3ca951",
    "other": "#9498a0",
}
PARAMETERS, OPTIMIZER, GRADIENTS, GATHERED, ACTIVATIONS, OTHER = CATEGORIES = tuple(COLORS)
MARK = "weft: mark "  # prefix of the name of a mark (see `timeline`); the number follows
POINTS = 1200
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1136, 380, 76, 36, 46, 44


@dataclass
class Allocation:
    """A block of memory from its allocation (`start`) to its release (`end`), in microseconds.

    `start` is -inf if the trace begins after the allocation. `end` is inf if the trace ends before the release.
    """

    address: int
    bytes: int
    start: float
    end: float = float("inf")
    category: str | None = None


@dataclass(frozen=True)
class Timeline:
    """Allocated bytes by category over time.

    Attributes:
        times: times in microseconds, as in the trace.
        amounts: the bytes at each of `times`, by category.
        steps: step number -> start and end of the step.
        peak: the highest total, in bytes.
        at_peak: the bytes of each category at the time of the peak.
    """

    times: list[float]
    amounts: dict[str, list[int]]
    steps: dict[int, Interval]
    peak: int
    at_peak: dict[str, int]


def timeline(
    trace: Trace,
    device: tuple[int, int],
    before: Sequence[tuple[int, int, str]] = (),
    marks: Mapping[int, Mapping[int, str]] | None = None,
) -> Timeline:
    """Classifies every allocation of a trace, and sums the allocations by category over time.

    A mark is a numbered range in the trace. `marks` lists the addresses whose categories were known when the mark
    ended. If an allocation exists at such an address when the mark ends, the allocation gets this category for its
    lifetime. All other allocations are classified by their start and end:

    - gathered parameters: allocated in an FSDP2 all-gather;
    - gradients: allocated or released in an FSDP2 gradient reduction;
    - activations: allocated outside of backward and released within backward;
    - other: all other allocations (temporaries of backward, recomputed activations, batches).

    Args:
        device: type and index of the device, as in `MemoryEvent.device`.
        before: address, size in bytes and category of each known allocation that is older than the trace.
        marks: number of each mark -> address -> category.
    """
    allocations = [Allocation(address, size, float("-inf"), category=category) for address, size, category in before]
    live = {allocation.address: allocation for allocation in allocations}
    events = [event for event in trace.memory if event.device == device]
    # A GPU's allocator reports its total. Memory that is not in `before` is older than the trace, too.
    unnamed = Allocation(-1, 0, float("-inf"), category=OTHER)
    if events and device[1] >= 0:
        unnamed.bytes = max(0, events[0].total - events[0].bytes - sum(size for _, size, _ in before))
    allocations.append(unnamed)
    moments = sorted((e.end, int(e.name.removeprefix(MARK))) for e in trace.events if e.name.startswith(MARK))

    def mark_until(time: float) -> None:
        while moments and moments[0][0] <= time:
            for address, category in (marks or {}).get(moments.pop(0)[1], {}).items():
                if address in live:
                    live[address].category = category

    for event in events:
        mark_until(event.time)
        if event.bytes > 0:
            live[event.address] = Allocation(event.address, event.bytes, event.time)
            allocations.append(live[event.address])
        elif event.address in live:
            live.pop(event.address).end = event.time
        else:  # a part of `unnamed` that is released within the trace
            size = min(-event.bytes, unnamed.bytes)
            unnamed.bytes -= size
            allocations.append(Allocation(event.address, size, float("-inf"), event.time, OTHER))
    mark_until(float("inf"))
    _classify(trace, allocations)
    return _sum(allocations, trace.steps)


def _classify(trace: Trace, allocations: list[Allocation]) -> None:
    """Sets the category of each allocation without a category, from the allocation's start and end."""

    def times(*prefixes: str) -> list[Interval]:
        ranges = (event for event in trace.events if event.category in ("user_annotation", "cpu_op"))
        return union((event.start, event.end) for event in ranges if event.name.startswith(prefixes))

    gathering = times("FSDP::all_gather")
    reducing = times("FSDP::post_backward_reduce", "FSDP::post_backward_accumulate")
    backward = times("autograd::engine::evaluate_function")
    for allocation in allocations:
        start, end = allocation.start, allocation.end
        if allocation.category is not None:
            continue
        if _within(gathering, start):
            allocation.category = GATHERED
        elif _within(reducing, start) or _within(reducing, end):
            allocation.category = GRADIENTS
        elif _within(backward, end) and not _within(backward, start):
            allocation.category = ACTIVATIONS
        else:
            allocation.category = OTHER


def _within(times: Sequence[Interval], moment: float) -> bool:
    at = bisect_right(times, (moment, float("inf"))) - 1
    return at >= 0 and times[at][0] <= moment <= times[at][1]


def _sum(allocations: Sequence[Allocation], steps: dict[int, Interval]) -> Timeline:
    """Sums the allocations by category over time.

    The time is divided into POINTS intervals. The result has only the moment with the highest total in each interval.
    """
    start = min((begin for begin, _ in steps.values()), default=0.0)
    end = max((end for _, end in steps.values()), default=1.0)
    now = dict.fromkeys(CATEGORIES, 0)
    changes: dict[float, Counter[str]] = defaultdict(Counter)
    for allocation in allocations:
        category = allocation.category or OTHER
        if allocation.start <= start:
            now[category] += allocation.bytes if allocation.end > start else 0
        elif allocation.start <= end:
            changes[allocation.start][category] += allocation.bytes
        if start < allocation.end <= end:
            changes[allocation.end][category] -= allocation.bytes
    kept: dict[int, tuple[float, dict[str, int]]] = {0: (start, dict(now))}
    for moment in sorted(changes):
        for category, size in changes[moment].items():
            now[category] += size
        part = int((moment - start) / (end - start) * POINTS)
        if part not in kept or sum(now.values()) > sum(kept[part][1].values()):
            kept[part] = (moment, dict(now))
    points = [*kept.values(), (end, dict(now))]
    peak = max(points, key=lambda point: sum(point[1].values()))[1]
    amounts = {category: [sizes[category] for _, sizes in points] for category in CATEGORIES}
    return Timeline([moment for moment, _ in points], amounts, steps, sum(peak.values()), peak)


def picture(line: Timeline, title: str) -> str:
    """Returns a standalone SVG document of the timeline, with one stacked area for each category."""
    begin, span = line.times[0], (line.times[-1] - line.times[0]) or 1.0
    largest = max(line.peak, 1) * 1.04
    x, y = Scale(begin, begin + span, LEFT, WIDTH - RIGHT), Scale(0, largest, HEIGHT - BOTTOM, TOP)
    legend, areas, at, floor = [], [], LEFT, [0] * len(line.times)
    for category, color in COLORS.items():
        if max(line.amounts[category]) > 0:
            label = f"{category} {byte_size(line.at_peak[category])}"
            legend.append((at, color, label))
            at += 34 + round(6.6 * len(label))
        above = [low + size for low, size in zip(floor, line.amounts[category], strict=True)]
        if above != floor:
            outline = [*_corners(line.times, above, x, y), *reversed(_corners(line.times, floor, x, y))]
            areas.append((category, color, "M" + "L".join(f"{a:g} {b:g}" for a, b in outline) + "Z"))
        floor = above
    return render(
        "memory.svg.j2",
        title=title,
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=WIDTH - RIGHT,
        top=TOP,
        bottom=HEIGHT - BOTTOM,
        legend=legend,
        sizes=[(y(size), byte_size(size)) for size in ticks(0, largest)],
        areas=areas,
        steps=[(step, x(start), x(end)) for step, (start, end) in line.steps.items()],
        moments=[(x(begin + tick * 1e3), f"{tick:,g} ms") for tick in ticks(0, span / 1e3, about=10)],
    )


def _corners(times: Sequence[float], sizes: Sequence[int], x: Scale, y: Scale) -> list[tuple[float, float]]:
    """Returns the corners of a step line, whose height is constant from each time to the next."""
    corners: list[tuple[float, float]] = []
    for moment, size in zip(times, sizes, strict=True):
        if corners:
            corners.append((x(moment), corners[-1][1]))
        corners.append((x(moment), y(size)))
    return corners

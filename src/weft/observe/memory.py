"""A device's memory over the profiled steps, by what it was for, from a trace's allocations; its picture, an SVG."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from weft.formatting import byte_size
from weft.observe.charts import Scale, ticks
from weft.observe.trace import Event, Interval, Trace, union

COLOURS = {
    "parameters": "#4269d0",
    "optimizer state": "#9c6b4e",
    "gradients": "#efb118",
    "gathered parameters": "#97bbf5",
    "activations": "#3ca951",
    "other": "#9498a0",
}
PARAMETERS, OPTIMIZER, GRADIENTS, GATHERED, ACTIVATIONS, OTHER = CATEGORIES = tuple(COLOURS)
MARK = "weft: mark "  # an instant at which it is known what lies at some addresses, with its number
POINTS = 1200
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1136, 380, 76, 36, 46, 44


@dataclass
class Allocation:
    """Memory from when it was taken to when it was given back; before and after the trace it is infinite."""

    address: int
    bytes: int
    start: float
    end: float = float("inf")
    category: str | None = None


@dataclass(frozen=True)
class Timeline:
    """Bytes by category over time.

    Attributes:
        times: microseconds of the trace.
        amounts: for each category of CATEGORIES, as many numbers of bytes as there are times.
        steps: number and time of each step.
        peak: the most bytes in all, and of each category at that moment.
    """

    times: list[float]
    amounts: dict[str, list[int]]
    steps: dict[int, Interval]
    peak: int
    at_peak: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """The peak, as JSON."""
        return {"peak_bytes": self.peak, "at_peak_bytes": self.at_peak}


def timeline(
    trace: Trace,
    device: tuple[int, int],
    before: Sequence[tuple[int, int, str]] = (),
    marks: Mapping[int, Mapping[int, str]] | None = None,
) -> Timeline:
    """Follow every allocation of a trace.

    What lies at a marked address at the mark's moment has the mark's category, from when it was taken to when it is
    given back. Of the rest, what FSDP2's ranges take for an all-gather are gathered parameters; what they take for, or
    give back in, a reduction of gradients are gradients; what is taken outside of backward and given back within it
    are activations; and what is left is "other": what backward itself needs for a while, recomputed activations,
    batches.

    Args:
        device: whose memory, as `MemoryEvent.device`.
        before: address, bytes and category of what was there before the trace began.
        marks: for the number of each mark, categories by address.
    """
    allocations = [Allocation(address, size, float("-inf"), category=category) for address, size, category in before]
    live = {allocation.address: allocation for allocation in allocations}
    events = [event for event in trace.memory if event.device == device]
    # A GPU's allocator tells all that it holds; what of it nobody has named was there before.
    unnamed = Allocation(-1, 0, float("-inf"), category=OTHER)
    if events and device[1] >= 0:
        unnamed.bytes = max(0, events[0].total - events[0].bytes - sum(size for _, size, _ in before))
    allocations.append(unnamed)
    moments = sorted(
        (event.end, int(event.name.removeprefix(MARK))) for event in trace.events if event.name.startswith(MARK)
    )
    for event in events:
        while moments and moments[0][0] <= event.time:
            _mark(live, (marks or {}).get(moments.pop(0)[1], {}))
        if event.bytes > 0:
            live[event.address] = Allocation(event.address, event.bytes, event.time)
            allocations.append(live[event.address])
        elif event.address in live:
            live.pop(event.address).end = event.time
        else:
            # Taken before the trace: from then on there is so much less. Two pieces, as if it had been named.
            size = min(-event.bytes, unnamed.bytes)
            unnamed.bytes -= size
            allocations.append(Allocation(event.address, size, float("-inf"), event.time, OTHER))
    for _, number in moments:
        _mark(live, (marks or {}).get(number, {}))
    _guess(trace, allocations)
    return _sum(allocations, trace.steps)


def _mark(live: Mapping[int, Allocation], categories: Mapping[int, str]) -> None:
    for address, category in categories.items():
        if address in live:
            live[address].category = category


def _guess(trace: Trace, allocations: list[Allocation]) -> None:
    """Categories of what no mark named."""

    def times(*beginnings: str) -> list[Interval]:
        return union((e.start, e.end) for e in trace.events if _is_range(e) and e.name.startswith(beginnings))

    gathering = times("FSDP::all_gather")
    reducing = times("FSDP::post_backward_reduce", "FSDP::post_backward_accumulate")
    backward = times("autograd::engine::evaluate_function")
    for allocation in allocations:
        if allocation.category is not None:
            continue
        start, end = allocation.start, allocation.end
        if _within(gathering, start):
            allocation.category = GATHERED
        elif _within(reducing, start) or _within(reducing, end):
            allocation.category = GRADIENTS
        elif _within(backward, end) and not _within(backward, start):
            allocation.category = ACTIVATIONS
        else:
            allocation.category = OTHER


def _is_range(event: Event) -> bool:
    return event.category in ("user_annotation", "cpu_op")


def _within(times: Sequence[Interval], moment: float) -> bool:
    at = bisect_right(times, (moment, float("inf"))) - 1
    return at >= 0 and times[at][0] <= moment <= times[at][1]


def _sum(allocations: Sequence[Allocation], steps: dict[int, Interval]) -> Timeline:
    """Add up the allocations; of the moments in one POINTSth of the time, that with the greatest sum is kept."""
    if not steps:
        return Timeline([], {category: [] for category in CATEGORIES}, steps, 0, {})
    start, end = min(a for a, _ in steps.values()), max(b for _, b in steps.values())
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
    return Timeline(
        [moment for moment, _ in points],
        {category: [amounts[category] for _, amounts in points] for category in CATEGORIES},
        steps,
        sum(peak.values()),
        peak,
    )


def picture(line: Timeline, title: str) -> str:
    """The timeline as an SVG document: the categories one upon another, steps set apart; readable by itself."""
    if not line.times:
        line = Timeline([0.0, 1.0], {category: [0, 0] for category in CATEGORIES}, {}, 0, dict.fromkeys(CATEGORIES, 0))
    begin, span = line.times[0], (line.times[-1] - line.times[0]) or 1.0
    top = max(line.peak, 1) * 1.04
    x = Scale(begin, begin + span, LEFT, WIDTH - RIGHT)
    y = Scale(0, top, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#3b4252">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="16" font-size="14" font-weight="600">{escape(title)}</text>',
    ]
    across = LEFT
    for category in CATEGORIES:
        if max(line.amounts[category]) <= 0:
            continue
        label = f"{category} {byte_size(line.at_peak[category])}"
        parts.append(f'<rect x="{across}" y="26" width="11" height="11" rx="2" fill="{COLOURS[category]}"/>')
        parts.append(f'<text x="{across + 16}" y="36">{label}</text>')
        across += 34 + round(6.6 * len(label))
    for size in ticks(0, top):
        parts.append(f'<path stroke="#e5e9f0" d="M{LEFT} {y(size)}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(size) + 4}" text-anchor="end">{byte_size(size)}</text>')
    floor = [0] * len(line.times)
    for category in CATEGORIES:
        above = [low + size for low, size in zip(floor, line.amounts[category], strict=True)]
        if above != floor:
            outline = _steps(line.times, above, x, y)
            back = _steps(line.times, floor, x, y)[::-1]
            path = "M" + "L".join(f"{a:g} {b:g}" for a, b in (*outline, *back)) + "Z"
            parts.append(f'<path fill="{COLOURS[category]}" d="{path}"><title>{category}</title></path>')
        floor = above
    for step, (start, end) in line.steps.items():
        parts.append(f'<path stroke="#3b4252" stroke-dasharray="3 4" d="M{x(start)} {TOP}V{HEIGHT - BOTTOM}"/>')
        middle = (x(start) + x(end)) / 2
        parts.append(f'<text x="{middle:g}" y="{HEIGHT - 8}" text-anchor="middle">step {step}</text>')
    for moment in ticks(0, span / 1e3, about=10):
        at = x(begin + moment * 1e3)
        parts.append(f'<text x="{at}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{moment:,g} ms</text>')
    parts.append(f'<path stroke="#3b4252" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    return "\n".join([*parts, "</svg>\n"])


def _steps(times: Sequence[float], sizes: Sequence[int], x: Scale, y: Scale) -> list[tuple[float, float]]:
    """The corners of a line that keeps its height until the next moment."""
    corners: list[tuple[float, float]] = []
    for moment, size in zip(times, sizes, strict=True):
        if corners:
            corners.append((x(moment), corners[-1][1]))
        corners.append((x(moment), y(size)))
    return corners

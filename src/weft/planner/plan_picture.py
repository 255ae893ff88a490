"""Draws plans: their memory beside their time, and the timeline of a step of each pipeline rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from weft.config.run import RunConfig
from weft.formatting import byte_size, counted, timing
from weft.observe.charts import Scale, ticks
from weft.observe.report import render
from weft.observe.scatter import Points, scatter_svg
from weft.planner.hardware import Hardware
from weft.planner.no_plan import NoPlan
from weft.planner.plan import RunPlan, RunPlans, capacity
from weft.planner.search import search
from weft.planner.timeline import Event

LESS = 0.7  # memory limit of the next point of the front, as a fraction of the memory of the plan before
MOST = 6  # points of the front
RANKS = 16  # pipeline ranks that are drawn
WIDTH, LEFT, RIGHT, TOP, LANE, GAP, AXIS = 1100, 150, 20, 34, 22, 8, 34
LETTER = 7.0  # pixels that a letter of a label needs
COLORS = {
    "forward": ("#2563eb", "forward"),
    "backward": ("#059669", "backward"),
    "input": ("#10b981", "gradients of inputs"),
    "weight": ("#84cc16", "gradients of weights"),
    "recompute": ("#d97706", "recomputation"),
    "other": ("#475569", "communication"),
}
BORDER = ' stroke="#ffffff" stroke-width="0.4"'
KINDS = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}  # actions of a pipeline schedule


def front(plans: RunPlans, config: RunConfig, devices: int, hardware: Hardware) -> list[RunPlan]:
    """Returns plans of which none needs less memory and less time than another, from fast to slow.

    Searches again and again with a memory limit of `LESS` times the memory of the plan before (the epsilon-constraint
    method; Haimes et al., 1971), `MOST` times at most.

    Args:
        plans: the result of the search without a limit.
        config: the config that was searched.
    """
    found = [plans.best[0]]
    for _ in range(MOST):
        limit = LESS * found[-1].memory.total / 1e9
        device = hardware.device.model_copy(update={"memory_gb": limit})
        try:
            plan = search(config, devices, hardware.model_copy(update={"device": device}), limit=1).best[0]
        except NoPlan:
            break
        found.append(RunPlan(plan.config, devices, hardware, plan.prediction, plan.ranks))
    # A search that skips candidates by estimates can miss a plan that a later search finds.
    seconds = [plan.prediction.step_seconds for plan in found]
    return [plan for place, plan in enumerate(found) if seconds[place] <= min(seconds[place:])]


def plans_page(plans: RunPlans, on_front: Sequence[RunPlan], title: str) -> str:
    """Returns an HTML page without scripts: the plans by memory and time, and a step of the best plan.

    Args:
        plans: the plans that are drawn.
        on_front: plans from fast to slow (see `front`).
        title: the headline.
    """
    return render(
        "plan.html.j2",
        title=title,
        plans=[(number, plan, axes_text(plan)) for number, plan in enumerate(plans.best, 1)],
        front=[(plan, axes_text(plan)) for plan in on_front],
        scatter=memory_and_time(plans, on_front),
        timeline=timeline_svg(plans.best[0]),
        byte_size=byte_size,
        timing=timing,
    )


def axes_text(plan: RunPlan) -> str:
    """Returns the axes of a plan with more than one rank."""
    return " ".join(f"{axis} {size}" for axis, size in plan.axes.items() if size > 1) or "one rank"


def memory_and_time(plans: RunPlans, on_front: Sequence[RunPlan]) -> str:
    """Returns an SVG of the plans by memory per rank and seconds per step."""

    def places(of: Sequence[RunPlan]) -> list[tuple[float, float]]:
        return [(plan.memory.total / 1e9, plan.prediction.step_seconds) for plan in of]

    series = [Points("least time with this memory", places(on_front), line=True, color=0)] if len(on_front) > 1 else []
    series += [Points(f"plan {number}", places([plan]), color=number % 8) for number, plan in enumerate(plans.best, 1)]
    if plans.near:
        series.append(Points("too large for the device", places(plans.near), color=9))
    shown = [*on_front, *plans.best, *plans.near]
    times = [plan.prediction.step_seconds for plan in shown]
    most = capacity(plans.best[0].hardware) / 1e9
    limit = [(most, 0.98 * min(times)), (most, 1.02 * max(times))]
    series.append(Points(f"memory of the device: {most:g} GB", limit, line=True, marks=False, color=8))
    title = f"Memory and time of plans on {counted(plans.best[0].devices, 'device')}"
    return scatter_svg(
        title, ("GB per rank", "seconds per step"), series, logarithmic=(False, False), size=(WIDTH, 420)
    )


def timeline_svg(plan: RunPlan) -> str:
    """Returns an SVG of the first micro-batches of a step: a lane for each pipeline rank and stream."""
    lanes = [
        (f"rank {rank}: {stream}" if len(plan.prediction.stages) > 1 else stream, events)
        for rank, every in enumerate(plan.prediction.stages[:RANKS])
        for stream, events in _streams(every)
    ]
    end = max(event.end for _, events in lanes for event in events)
    height = TOP + len(lanes) * (LANE + GAP) + AXIS
    scale = Scale(0.0, end, LEFT, WIDTH - RIGHT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    bottom = height - AXIS
    for value in ticks(0.0, end):
        at = scale(value)
        parts.append(f'<line x1="{at}" y1="{TOP - 6}" x2="{at}" y2="{bottom}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{timing(value) if value else 0}</text>')
    for row, (name, events) in enumerate(lanes):
        top = TOP + row * (LANE + GAP)
        parts.append(f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{escape(name)}</text>')
        parts += [text for event in events for text in _bar(event, top, scale)]
    used = {_kind(event) for _, events in lanes for event in events}
    at = float(LEFT)
    for kind, (color, text) in COLORS.items():
        if kind in used:
            parts.append(f'<rect x="{at}" y="6" width="10" height="10" fill="{color}"/>')
            parts.append(f'<text x="{at + 15}" y="15">{text}</text>')
            at += 32 + LETTER * len(text)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _streams(events: Sequence[Event]) -> list[tuple[str, list[Event]]]:
    """Returns the events by stream, computation first."""
    found: dict[str, list[Event]] = {"compute": []}
    for event in events:
        found.setdefault(event.stream, []).append(event)
    return [(stream, own) for stream, own in found.items() if own]


def _kind(event: Event) -> str:
    if event.stream != "compute":
        return "other"
    return event.name if event.name in COLORS else KINDS.get(event.name[:1], "other")


def _bar(event: Event, top: int, scale: Scale) -> Iterator[str]:
    left, right = scale(event.start), scale(event.end)
    color = COLORS[_kind(event)][0]
    about = f"{event.name}: {timing(event.end - event.start)}, from {timing(event.start)}"
    width = max(0.3, right - left)
    yield (
        f'<rect x="{left}" y="{top}" width="{width:.1f}" height="{LANE}" fill="{color}"'
        f"{BORDER if width > 3 else ''}>"
        f"<title>{escape(about)}</title></rect>"
    )
    if width > 4 + LETTER * len(event.name):
        middle = (left + right) / 2
        yield f'<text x="{middle:.1f}" y="{top + 15}" text-anchor="middle" fill="#ffffff">{escape(event.name)}</text>'

"""Curves for the report: numbers to SVG coordinates. Nothing is drawn here; `report.html.j2` does that."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_POINTS = 1000  # more would not be seen: a chart is less than a thousand dots wide
LEFT, RIGHT, TOP, BOTTOM = 62, 28, 12, 30


@dataclass(frozen=True)
class Series:
    """Numbers by step; NaN and infinities leave gaps.

    Attributes:
        name: in the read-out.
        steps, values: of equal length, steps growing.
        kind: "train" or "validation" (colour; validation has a mark at each point).
        smooth: draw the running mean over the numbers, which are then drawn faint.
    """

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    kind: str = "train"
    smooth: bool = False


@dataclass
class Curve:
    """A series in coordinates: SVG path data, marks, and what the read-out says at each point."""

    name: str
    kind: str
    path: str = ""
    mean_path: str = ""
    band: str = ""
    marks: list[tuple[float, float]] = field(default_factory=list)
    readout: dict[str, list[Any]] = field(default_factory=dict)


@dataclass
class Chart:
    """All that the page needs to draw one chart; positions in the units of its `width` x `height` box."""

    key: str
    title: str
    note: str
    width: int
    height: int
    box: tuple[float, float, float, float]  # left, top, right, bottom of the plot
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    curves: list[Curve]
    resumes: list[tuple[float, int]]
    bad: list[tuple[float, int]]  # where a value was not finite
    per_point: int = 1  # how many logged steps one point is the mean of

    @property
    def readout(self) -> dict[str, Any]:
        """What the page's script needs for the hover read-out."""
        return {"box": self.box, "width": self.width, "curves": [{"n": c.name, **c.readout} for c in self.curves]}


def short(value: float) -> str:
    """A number for an axis: 0, 3e-4, 0.25, 12.5, 1,500, 12k, 3.5M."""
    size = abs(value)
    if size == 0:
        return "0"
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.4g}{letter}"
    if size < 1e-3:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten apart) from `low` to `high`."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from `low` to `high`; with 2 and 5 times them where there are few."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, len(exponents) // 6)
    factors = (1, 2, 5) if len(exponents) <= 3 else (1,)
    return [f * 10.0**e for e in exponents if e % every == 0 for f in factors if low <= f * 10.0**e <= high]


def neighbour_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of the finite ones among `window` neighbours, half on each side (a mean of the past would lag behind the
    curve); NaN where the value itself is not finite."""
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    means = []
    for at, value in enumerate(values):
        reach = min(window // 2, at, len(values) - 1 - at)  # the same on both sides, or the ends would bend
        low, high = at - reach, at + reach + 1
        means.append((sums[high] - sums[low]) / (counts[high] - counts[low]) if math.isfinite(value) else math.nan)
    return means


@dataclass(frozen=True)
class _Points:
    """A series cut to at most MOST_POINTS: means of equally many neighbours, with the least and the greatest."""

    steps: list[float]
    values: list[float]
    least: list[float] | None
    greatest: list[float] | None
    labels: list[str]
    per_point: int


def _points(series: Series) -> _Points:
    count = len(series.values)
    per_point = math.ceil(count / MOST_POINTS)
    if per_point <= 1:
        labels = [f"{step:,}" for step in series.steps]
        return _Points([float(s) for s in series.steps], list(series.values), None, None, labels, 1)
    steps, values, least, greatest, labels = [], [], [], [], []
    for start in range(0, count, per_point):
        some_steps = series.steps[start : start + per_point]
        some = [v for v in series.values[start : start + per_point] if math.isfinite(v)]
        steps.append((some_steps[0] + some_steps[-1]) / 2)
        values.append(sum(some) / len(some) if some else math.nan)
        least.append(min(some, default=math.nan))
        greatest.append(max(some, default=math.nan))
        labels.append(f"{some_steps[0]:,} to {some_steps[-1]:,}" if len(some_steps) > 1 else f"{some_steps[0]:,}")
    return _Points(steps, values, least, greatest, labels, per_point)


def make_chart(
    key: str,
    title: str,
    series: Sequence[Series],
    *,
    text: Callable[[float], str],
    axis: Callable[[float], str] = short,
    from_zero: bool = False,
    allow_log: bool = False,
    resumes: Sequence[int] = (),
    note: str = "",
    width: int = 560,
    height: int = 250,
) -> Chart | None:
    """A chart of one or more series; None if there is no finite number in them.

    Args:
        text: a value for the read-out. axis: a value for the axis.
        from_zero: the axis begins at zero (for amounts, so that a wiggle does not look like a collapse).
        allow_log: a logarithmic axis if the greatest is far (100 times) above the least; the note says so.
        resumes: steps after which the run was resumed.
    """
    finite = [v for one in series for v in one.values if math.isfinite(v)]
    if not finite:
        return None
    notes = [note] if note else []
    all_steps = [step for one in series for step in one.steps]
    x_low, x_high = min(all_steps), max(all_steps)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    low, high = min(finite), max(finite)
    logarithmic = allow_log and low > 0 and high / low > 100
    if logarithmic:
        notes.append("logarithmic axis")
        low, high = low / 1.2, high * 1.2
    else:
        low = min(low, 0.0) if from_zero else low
        margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        low, high = (low if from_zero and low == 0 else low - margin), high + margin
    scale = math.log10 if logarithmic else float
    box = (float(LEFT), float(TOP), float(width - RIGHT), float(height - BOTTOM))

    def x(step: float) -> float:
        return round(box[0] + (step - x_low) / (x_high - x_low) * (box[2] - box[0]), 1)

    def y(value: float) -> float:
        return round(box[3] - (scale(value) - scale(low)) / (scale(high) - scale(low)) * (box[3] - box[1]), 1)

    curves, bad, per_point = [], [], 1
    for one in series:
        points = _points(one)
        xs = [x(step) for step in points.steps]
        ys = [y(v) if math.isfinite(v) else None for v in points.values]
        curve = Curve(one.name, one.kind, path=_path(xs, ys))
        labels = [text(v) if math.isfinite(v) else str(v) for v in points.values]
        if points.least is not None and points.greatest is not None:
            curve.band = _band(xs, [(y(a), y(b)) for a, b in _pairs(points.least, points.greatest)])
            labels = [
                f"{label} ({text(a)} to {text(b)})" if math.isfinite(a) else label
                for label, a, b in zip(labels, points.least, points.greatest, strict=True)
            ]
            per_point = max(per_point, points.per_point)
        window = len(points.values) // 50
        if one.smooth and window >= 2:
            means = neighbour_mean(points.values, window)
            curve.mean_path = _path(xs, [y(v) if math.isfinite(v) else None for v in means])
            notes.append(f"bold: the mean of {2 * (window // 2) + 1} neighbouring points")
        if one.kind == "validation" or sum(v is not None for v in ys) == 1:
            curve.marks = [(a, b) for a, b in zip(xs, ys, strict=True) if b is not None]
        curve.readout = {"x": xs, "y": ys, "t": labels, "s": points.labels}
        curves.append(curve)
        bad += [(x(s), s) for s, v in zip(one.steps, one.values, strict=True) if not math.isfinite(v)]
    if bad:
        notes.append(f"{len(bad):,} value{'s' * (len(bad) > 1)} not finite (marked at the top)")
    y_values = log_ticks(low, high) if logarithmic else ticks(low, high)
    x_values = sorted({round(v) for v in ticks(x_low, x_high, about=max(4, width // 110)) if v == round(v)})
    return Chart(
        key=key,
        title=title,
        note="; ".join(notes),
        width=width,
        height=height,
        box=box,
        x_ticks=[(x(v), short(v) if v >= 1e6 else f"{v:,}") for v in x_values],
        y_ticks=[(y(v), axis(v)) for v in y_values],
        curves=curves,
        resumes=[(x(step), step) for step in resumes if x_low <= step <= x_high],
        bad=bad[:: max(1, len(bad) // 200)],
        per_point=per_point,
    )


def _path(xs: Sequence[float], ys: Sequence[float | None]) -> str:
    """SVG path data, with gaps where y is None."""
    parts, pen_down = [], False
    for a, b in zip(xs, ys, strict=True):
        if b is None:
            pen_down = False
        else:
            parts.append(f"{'L' if pen_down else 'M'}{a:g} {b:g}")
            pen_down = True
    return "".join(parts)


def _pairs(least: Sequence[float], greatest: Sequence[float]) -> list[tuple[float, float]]:
    """Bounds without gaps: a point without finite values takes its neighbour's (the mean's line shows the gap)."""
    pairs: list[tuple[float, float]] = []
    known = next(((a, b) for a, b in zip(least, greatest, strict=True) if math.isfinite(a)), (0.0, 0.0))
    for a, b in zip(least, greatest, strict=True):
        known = (a, b) if math.isfinite(a) else known
        pairs.append(known)
    return pairs


def _band(xs: Sequence[float], bounds: Sequence[tuple[float, float]]) -> str:
    there = [f"{a:g} {b[0]:g}" for a, b in zip(xs, bounds, strict=True)]
    back = [f"{a:g} {b[1]:g}" for a, b in zip(xs, bounds, strict=True)][::-1]
    return "M" + "L".join(there + back) + "Z"

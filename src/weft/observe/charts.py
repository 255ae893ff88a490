"""Curves for the report: numbers to SVG coordinates. Nothing is drawn here; `report.html.j2` does that."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.formatting import counted, tick

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


@dataclass(frozen=True)
class Plot:
    """What one chart shows.

    Attributes:
        text: a value for the read-out. axis: a value for the axis.
        from_zero: the axis begins at zero (for amounts, so that a wiggle does not look like a collapse).
        allow_log: a logarithmic axis if the greatest is far (100 times) above the least; the note says so.
    """

    key: str
    title: str
    series: Sequence[Series]
    text: Callable[[float], str]
    axis: Callable[[float], str] = tick
    from_zero: bool = False
    allow_log: bool = False
    note: str = ""
    width: int = 560
    height: int = 250


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` as positions from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (
            (math.log10(v) for v in (self.low, self.high, value)) if self.logarithmic else (self.low, self.high, value)
        )
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)


@dataclass
class Curve:
    """A series in coordinates: SVG path data, marks, and what the read-out says at each point.

    Attributes:
        per_point: how many numbers one point is the mean of.
        window: how many points the bold line is the mean of; 0: there is none.
    """

    name: str
    kind: str
    path: str
    readout: dict[str, list[Any]]
    per_point: int
    mean_path: str = ""
    window: int = 0
    band: str = ""
    marks: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Chart:
    """A plot in the units of its `width` x `height` box."""

    plot: Plot
    note: str
    box: tuple[float, float, float, float]  # left, top, right, bottom
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    curves: list[Curve]
    resumes: list[tuple[float, int]]
    bad: list[tuple[float, int]]  # where a value was not finite

    @property
    def readout(self) -> dict[str, Any]:
        """What the page's script needs for the hover read-out."""
        return {"box": self.box, "width": self.plot.width, "curves": [{"n": c.name, **c.readout} for c in self.curves]}


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


def draw(plot: Plot, resumes: Sequence[int] = ()) -> Chart | None:
    """The chart of a plot; None if there is no finite number in it.

    Args:
        resumes: steps after which the run was resumed.
    """
    finite = [v for one in plot.series for v in one.values if math.isfinite(v)]
    if not finite:
        return None
    steps = [step for one in plot.series for step in one.steps]
    alone = min(steps) == max(steps)
    box = (float(LEFT), float(TOP), float(plot.width - RIGHT), float(plot.height - BOTTOM))
    x = Scale(min(steps) - alone, max(steps) + alone, box[0], box[2])
    y = _y_scale(plot, min(finite), max(finite), box)
    curves = [_curve(one, plot.text, x, y) for one in plot.series]
    bad = [(x(s), s) for one in plot.series for s, v in zip(one.steps, one.values, strict=True) if not math.isfinite(v)]
    notes = [plot.note] if plot.note else []
    notes += ["logarithmic axis"] * y.logarithmic
    notes += [f"bold: the mean of {curve.window} neighbouring points" for curve in curves if curve.window]
    notes += [f"{counted(len(bad), 'value')} not finite (marked at the top)"] if bad else []
    x_values = {round(v) for v in ticks(x.low, x.high, about=max(4, plot.width // 110)) if v == round(v)}
    return Chart(
        plot=plot,
        note="; ".join(notes),
        box=box,
        x_ticks=[(x(v), tick(v) if v >= 1e6 else f"{v:,}") for v in sorted(x_values)],
        y_ticks=[(y(v), plot.axis(v)) for v in (log_ticks if y.logarithmic else ticks)(y.low, y.high)],
        curves=curves,
        resumes=[(x(step), step) for step in resumes if x.low <= step <= x.high],
        bad=bad[:: max(1, len(bad) // 200)],
    )


def _y_scale(plot: Plot, low: float, high: float, box: tuple[float, float, float, float]) -> Scale:
    if plot.allow_log and low > 0 and high / low > 100:
        return Scale(low / 1.2, high * 1.2, box[3], box[1], logarithmic=True)
    low = min(low, 0.0) if plot.from_zero else low
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(low if plot.from_zero and low == 0 else low - margin, high + margin, box[3], box[1])


def _curve(one: Series, text: Callable[[float], str], x: Scale, y: Scale) -> Curve:
    """Of more than MOST_POINTS numbers, means of equally many neighbours, in a band from the least to the greatest."""
    per_point = max(1, math.ceil(len(one.values) / MOST_POINTS))
    xs, labels, values, bounds = [], [], [], []
    for start in range(0, len(one.values), per_point):
        steps, some = one.steps[start : start + per_point], one.values[start : start + per_point]
        finite = [v for v in some if math.isfinite(v)]
        xs.append(x((steps[0] + steps[-1]) / 2))
        labels.append(f"{steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"{steps[0]:,}")
        values.append(some[0] if per_point == 1 else sum(finite) / len(finite) if finite else math.nan)
        bounds.append((min(finite), max(finite)) if finite else None)

    def heights(numbers: Sequence[float]) -> list[float | None]:
        return [y(v) if math.isfinite(v) else None for v in numbers]

    ys, texts = heights(values), [text(v) if math.isfinite(v) else str(v) for v in values]
    if per_point > 1:
        texts = [f"{t} ({text(b[0])} to {text(b[1])})" if b else t for t, b in zip(texts, bounds, strict=True)]
    curve = Curve(one.name, one.kind, _path(xs, ys), {"x": xs, "y": ys, "t": texts, "s": labels}, per_point)
    if per_point > 1:
        curve.band = _band(xs, [(y(low), y(high)) for low, high in _without_gaps(bounds)])
    if one.smooth and (window := len(values) // 50) >= 2:
        curve.mean_path, curve.window = _path(xs, heights(neighbour_mean(values, window))), 2 * (window // 2) + 1
    if one.kind == "validation" or sum(v is not None for v in ys) == 1:
        curve.marks = [(a, b) for a, b in zip(xs, ys, strict=True) if b is not None]
    return curve


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


def _without_gaps(bounds: Sequence[tuple[float, float] | None]) -> list[tuple[float, float]]:
    """A point without finite values takes its neighbour's bounds (the mean's line shows the gap)."""
    known = next((pair for pair in bounds if pair), (0.0, 0.0))
    return [known := pair or known for pair in bounds]


def _band(xs: Sequence[float], bounds: Sequence[tuple[float, float]]) -> str:
    there = [f"{a:g} {b[0]:g}" for a, b in zip(xs, bounds, strict=True)]
    back = [f"{a:g} {b[1]:g}" for a, b in zip(xs, bounds, strict=True)][::-1]
    return "M" + "L".join(there + back) + "Z"

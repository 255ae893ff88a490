"""Computes the charts of the report: converts metrics to SVG coordinates, which `report.html.j2` draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.formatting import counted, tick

MOST_POINTS = 1000  # a chart is about a thousand pixels wide
LEFT, RIGHT, TOP, BOTTOM = 62, 28, 12, 30


@dataclass(frozen=True)
class Series:
    """A series of values by step. NaN and infinite values leave gaps.

    Attributes:
        name: the name in the legend and in the hover text.
        steps: the step of each value, increasing.
        values: the values, one for each step.
        kind: "train" or "validation". The kind sets the color; a validation series has a mark at each point.
        smooth: whether the values are drawn faint, under their moving average.
    """

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    kind: str = "train"
    smooth: bool = False


@dataclass(frozen=True)
class Plot:
    """The content of one chart.

    Attributes:
        key: the id of the chart in the page.
        text: formats a value for the hover text.
        axis: formats a value for the labels of the axis.
        from_zero: whether the axis starts at zero.
        allow_log: whether the axis becomes logarithmic if all values are positive and the maximum is more than 100
            times the minimum. The chart's note then says that the axis is logarithmic.
        note: a text below the title.
        width: width of the chart in SVG units.
        height: height of the chart in SVG units.
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
    """A linear or logarithmic map from values between `low` and `high` to positions between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)


@dataclass
class Curve:
    """A series in SVG coordinates.

    Attributes:
        path: SVG path data of the values.
        readout: the coordinates and hover texts of the points.
        per_point: number of values that each point averages.
        mean_path: SVG path data of the moving average; empty without a moving average.
        window: number of points that the moving average covers; 0 without a moving average.
        band: SVG path data of the area between the minimum and the maximum of the values that each point averages.
        marks: the positions of the points that have a mark.
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
    """A plot in SVG coordinates.

    Attributes:
        box: left, top, right and bottom of the plotting area.
        x_ticks: position and label of each tick of the x axis.
        y_ticks: position and label of each tick of the y axis.
        resumes: position and step of each resume.
        bad: position and step of each value that is not finite; if there are hundreds, every N-th of them.
        events: position and text of each event of the watch.
    """

    plot: Plot
    note: str
    box: tuple[float, float, float, float]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    curves: list[Curve]
    resumes: list[tuple[float, int]]
    bad: list[tuple[float, int]]
    events: list[tuple[float, str]]

    @property
    def readout(self) -> dict[str, Any]:
        """The data for the hover script of the page."""
        return {"box": self.box, "width": self.plot.width, "curves": [{"n": c.name, **c.readout} for c in self.curves]}


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Returns about `about` round numbers from `low` to `high`, at distances of 1, 2, 2.5 or 5 x a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Returns the powers of ten from `low` to `high`, for the ticks of a logarithmic axis.

    If there are few powers, also returns 2 and 5 times each power; if there are many, returns only every N-th power.
    """
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, len(exponents) // 6)
    factors = (1, 2, 5) if len(exponents) <= 3 else (1,)
    return [f * 10.0**e for e in exponents if e % every == 0 for f in factors if low <= f * 10.0**e <= high]


def centered_mean(values: Sequence[float], window: int) -> list[float]:
    """Returns a moving average: for each value, the mean of the finite values in a window centered on this value.

    The window shrinks symmetrically at the ends. The mean is NaN where the value is not finite.
    """
    means = []
    for at, value in enumerate(values):
        reach = min(window // 2, at, len(values) - 1 - at)
        near = [v for v in values[at - reach : at + reach + 1] if math.isfinite(v)]
        means.append(sum(near) / len(near) if math.isfinite(value) else math.nan)
    return means


def draw(plot: Plot, resumes: Sequence[int] = (), events: Sequence[tuple[int, str]] = ()) -> Chart | None:
    """Converts a plot to SVG coordinates. Returns None if the plot has no finite value.

    Args:
        resumes: steps after which the run was resumed.
        events: step and text of each event of the watch.
    """
    points = [point for one in plot.series for point in zip(one.steps, one.values, strict=True)]
    finite = [value for _, value in points if math.isfinite(value)]
    if not finite:
        return None
    first, last = min(points)[0], max(points)[0]
    box = (float(LEFT), float(TOP), float(plot.width - RIGHT), float(plot.height - BOTTOM))
    x = Scale(first - (first == last), last + (first == last), box[0], box[2])
    y = _y_scale(plot, min(finite), max(finite), box)
    curves = [_curve(one, plot.text, x, y) for one in plot.series]
    bad = [(x(step), step) for step, value in points if not math.isfinite(value)]
    notes = [plot.note] if plot.note else []
    notes += ["logarithmic axis"] * y.logarithmic
    notes += [f"bold: moving average over {curve.window} points" for curve in curves if curve.window]
    notes += [f"{counted(len(bad), 'value')} not finite (marked at the top)"] if bad else []
    marked = [(x(step), text) for step, text in events if x.low <= step <= x.high]
    notes += [f"triangles: {counted(len(marked), 'event')} of the watch"] if marked else []
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
        events=marked,
    )


def _y_scale(plot: Plot, low: float, high: float, box: tuple[float, float, float, float]) -> Scale:
    if plot.allow_log and low > 0 and high / low > 100:
        return Scale(low / 1.2, high * 1.2, box[3], box[1], logarithmic=True)
    low = min(low, 0.0) if plot.from_zero else low
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(low if plot.from_zero and low == 0 else low - margin, high + margin, box[3], box[1])


def _curve(one: Series, text: Callable[[float], str], x: Scale, y: Scale) -> Curve:
    """Converts a series to SVG coordinates.

    More than MOST_POINTS values are averaged in bins. A band then shows the minimum and maximum of each bin.
    """
    per_point = max(1, math.ceil(len(one.values) / MOST_POINTS))
    xs, labels, texts, values = [], [], [], []
    band: list[tuple[float, float, float]] = []  # x, lowest y, highest y
    for start in range(0, len(one.values), per_point):
        steps, some = one.steps[start : start + per_point], one.values[start : start + per_point]
        finite = [v for v in some if math.isfinite(v)]
        value = some[0] if per_point == 1 else sum(finite) / len(finite) if finite else math.nan
        shown = text(value) if math.isfinite(value) else str(value)
        xs.append(x((steps[0] + steps[-1]) / 2))
        labels.append(f"{steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else f"{steps[0]:,}")
        values.append(value)
        if per_point > 1 and finite:
            low, high = min(finite), max(finite)
            shown = f"{shown} ({text(low)} to {text(high)})"
            band.append((xs[-1], y(low), y(high)))
        texts.append(shown)

    def heights(numbers: Sequence[float]) -> list[float | None]:
        return [y(v) if math.isfinite(v) else None for v in numbers]

    ys = heights(values)
    curve = Curve(one.name, one.kind, _path(xs, ys), {"x": xs, "y": ys, "t": texts, "s": labels}, per_point)
    if band:
        outline = [f"{at:g} {low:g}" for at, low, _ in band] + [f"{at:g} {high:g}" for at, _, high in reversed(band)]
        curve.band = "M" + "L".join(outline) + "Z"
    if one.smooth and (window := len(values) // 50) >= 2:
        curve.mean_path, curve.window = _path(xs, heights(centered_mean(values, window))), 2 * (window // 2) + 1
    if one.kind == "validation" or sum(v is not None for v in ys) == 1:
        curve.marks = [(a, b) for a, b in zip(xs, ys, strict=True) if b is not None]
    return curve


def _path(xs: Sequence[float], ys: Sequence[float | None]) -> str:
    """Returns SVG path data of a line, with a gap where y is None."""
    parts, pen_down = [], False
    for a, b in zip(xs, ys, strict=True):
        if b is not None:
            parts.append(f"{'L' if pen_down else 'M'}{a:g} {b:g}")
        pen_down = b is not None
    return "".join(parts)

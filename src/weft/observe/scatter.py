"""Draws points and lines over two axes as an SVG file, for plots of measurements and fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from weft.formatting import tick
from weft.observe.charts import Scale, log_ticks, ticks

COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f", "#475569", "#b45309")
LEFT, TOP, BOTTOM, LEGEND = 70.0, 40.0, 50.0, 230.0
ROW = 18.0  # height of a line of the legend


@dataclass(frozen=True)
class Points:
    """Points of one color.

    Attributes:
        name: the text in the legend; empty: none.
        points: x and y of each point.
        line: whether the points are connected, in their order.
        marks: whether each point has a mark.
        color: index of the color; None: the next one.
    """

    name: str
    points: Sequence[tuple[float, float]]
    line: bool = False
    marks: bool = True
    color: int | None = None


def scatter_svg(
    title: str,
    axes: tuple[str, str],
    series: Sequence[Points],
    *,
    logarithmic: tuple[bool, bool] = (True, True),
    size: tuple[int, int] = (860, 460),
) -> str:
    """Returns an SVG file.

    Args:
        axes: texts of the x axis and of the y axis.
        logarithmic: whether the x axis and the y axis are logarithmic; then all their values must be positive.
        size: width and height in pixels.
    """
    width, height = size
    box = LEFT, TOP, width - LEGEND, height - BOTTOM
    columns = [[point[at] for one in series for point in one.points] for at in (0, 1)]
    x = _scale(columns[0], box[0], box[2], logarithmic[0])
    y = _scale(columns[1], box[3], box[1], logarithmic[1])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="600">{escape(title)}</text>',
        *_grid(x, y, box),
        f'<text x="{(box[0] + box[2]) / 2}" y="{height - 10}" text-anchor="middle">{escape(axes[0])}</text>',
        f'<text transform="translate(16 {(box[1] + box[3]) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(axes[1])}</text>",
    ]
    row = 0
    for number, one in enumerate(series):
        color = COLORS[(number if one.color is None else one.color) % len(COLORS)]
        places = [(x(a), y(b)) for a, b in one.points]
        if one.line:
            path = " ".join(f"{a:g},{b:g}" for a, b in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if one.marks:
            parts += [f'<circle cx="{a:g}" cy="{b:g}" r="3" fill="{color}"/>' for a, b in places]
        if one.name:
            at = box[1] + 8 + ROW * row
            parts.append(f'<rect x="{box[2] + 16}" y="{at - 8}" width="10" height="10" fill="{color}"/>')
            parts.append(f'<text x="{box[2] + 32}" y="{at + 1}">{escape(one.name)}</text>')
            row += 1
    return "\n".join([*parts, "</svg>"]) + "\n"


def _scale(values: Sequence[float], start: float, end: float, logarithmic: bool) -> Scale:
    low, high = min(values), max(values)
    if logarithmic:
        return Scale(low / 1.2, high * 1.2, start, end, logarithmic=True)
    margin = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(low - margin, high + margin, start, end)


def _grid(x: Scale, y: Scale, box: tuple[float, float, float, float]) -> list[str]:
    """Returns the lines and labels of both axes. Labels that would touch the label before are left out."""
    parts = []
    left, top, right, bottom = box
    columns = [(x(value), value) for value in _ticks(x)]
    for at, value in _apart(columns, 45):
        parts.append(f'<line x1="{at}" y1="{top}" x2="{at}" y2="{bottom}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{_label(value)}</text>')
    for at, value in _apart([(y(value), value) for value in _ticks(y)], 16):
        parts.append(f'<line x1="{left}" y1="{at}" x2="{right}" y2="{at}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{left - 6}" y="{at + 4}" text-anchor="end">{_label(value)}</text>')
    return parts


def _apart(places: list[tuple[float, float]], least: float) -> list[tuple[float, float]]:
    kept = places[:1]
    for place in places[1:]:
        if abs(place[0] - kept[-1][0]) >= least:
            kept.append(place)
    return kept


def _label(value: float) -> str:
    return tick(value) if value < 1e15 else f"{value:.0e}".replace("e+", "e")


def _ticks(scale: Scale) -> list[float]:
    return (log_ticks if scale.logarithmic else ticks)(scale.low, scale.high)

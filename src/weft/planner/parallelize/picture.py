"""Pictures of plans."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from torch.distributed.tensor import Replicate, Shard

from weft.planner.parallelize.mesh import mesh_text
from weft.planner.parallelize.placements import placement_text
from weft.planner.parallelize.tables import Found, Search

COLORS = {"none": "#e8e8e8", "0": "#cfe3ff", "1": "#d6f5d6", "2": "#ffe6bf", "3": "#f3d1f4", "sum": "#ffc9c9"}
WIDTH, HEIGHT, GAP = 560, 26, 6


def picture(search: Search, found: Found, stages: Sequence[tuple[str, Sequence[str]]] = ()) -> str:
    """Returns an SVG of the operations in the order in which they run, colored by the placement of their results.

    Args:
        stages: pipeline stages, which are listed at the end.
    """
    rows = []
    for place, (step, strategy) in enumerate(zip(search.space.steps, found.strategies, strict=True)):
        axes = found.prices.chosen(place, strategy)
        states = [next((one for one in axis.outputs if one is not None), None) for axis in axes]
        placements = [state.forward[0] for state in states if state is not None]
        moved = any(axis.moved for axis in axes)
        if placements and (moved or step.kind not in ("enter", "leave")):
            rows.append((step, placements, moved))
    legend = [("replicated", "none"), *((f"dim {dim} split", str(dim)) for dim in range(4)), ("partial sum", "sum")]
    mesh = mesh_text({"dp": found.setting.dp, "tp": found.setting.tp, "tp2": found.setting.tp2})
    height = (len(rows) + len(stages) + 2) * (HEIGHT + GAP) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 40}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><title>{mesh}</title>'
    ]
    for place, (text, color) in enumerate(legend):
        lines.append(
            f'<rect x="{20 + 94 * place}" y="10" width="14" height="14" fill="{COLORS[color]}" stroke="#888"/>'
            f'<text x="{38 + 94 * place}" y="21">{text}</text>'
        )
    for place, (step, placements, moved) in enumerate(rows, start=1):
        top = 14 + place * (HEIGHT + GAP)
        shown = ", ".join(map(placement_text, placements))
        placement = next((one for one in placements if not isinstance(one, Replicate)), placements[0])
        kind = "none" if isinstance(placement, Replicate) else "sum"
        color = COLORS.get(str(placement.dim) if isinstance(placement, Shard) else kind, "#ffffff")
        name = f"redistribute: {step.node.name} {step.kind}s" if moved else _label(step)
        times = f" x {step.node.times}" if step.node.times > 1 else ""
        stroke = "#c00" if moved else "#888"
        lines.append(
            f'<rect x="20" y="{top}" width="{WIDTH}" height="{HEIGHT}" rx="4" fill="{color}" stroke="{stroke}"/>'
            f'<text x="30" y="{top + 17}">{escape(name)}{times}</text>'
            f'<text x="{WIDTH + 10}" y="{top + 17}" text-anchor="end">{shown}</text>'
            f"<title>{escape(step.node.source)}</title>"
        )
    for number, (begin, names) in enumerate(stages):
        top = 14 + (len(rows) + 1 + number) * (HEIGHT + GAP)
        text = f"stage {number}: begins with {begin or 'the forward'}; has {', '.join(names)}"
        lines.append(f'<text x="20" y="{top + 17}">{escape(text)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _label(step: Any) -> str:
    node = step.node
    shape = " x ".join(map(str, node.outputs[0].shape)) if node.outputs and node.outputs[0] else ""
    where = node.modules[-1] if node.modules and node.kind == "op" else ""
    name = str(node.target).removeprefix("aten.").partition(".")[0] if node.kind == "op" else node.name
    return f"{where}: {name}  [{shape}]" if where else f"{name}  [{shape}]"

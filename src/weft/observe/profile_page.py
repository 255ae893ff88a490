"""Makes the tables of a profile for the terminal, and `profile.html`, from the content of `profile.json`."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import weft
from weft.formatting import byte_size, cell
from weft.observe.memory import CATEGORIES
from weft.observe.report import render

TIMES = ("seconds", "compute", "communication", "exposed", "idle", "data")
SHOWN_RANKS = 8  # with more ranks, the steps table has one mean per rank; the page shows at most 8 pictures
TOP = 12

Table = tuple[list[str], list[list[Any]]]


def tables(found: dict[str, Any], top: int = TOP) -> dict[str, Table]:
    """Returns the header and rows of each table, by the title of the table.

    Args:
        found: the content of `profile.json`.
        top: number of operators and of collectives to list.
    """
    return {
        "Milliseconds of each step": steps_table(found),
        "Operators": operators_table(found, top),
        "Collectives": collectives_table(found, top),
        "Memory": memory_table(found),
    }


def steps_table(found: dict[str, Any]) -> Table:
    """Returns a profile's times in milliseconds as a table: one row per step and rank, and a last row for the mean.

    With more than SHOWN_RANKS ranks, the table has only the mean of each rank, and the mean of all ranks.
    """
    ranks = found["per_rank"]
    if len(ranks) <= SHOWN_RANKS:
        steps = [(times["step"], report["rank"], times) for report in ranks for times in report["steps"]]
        steps.sort(key=lambda entry: entry[:2])
    else:
        steps = [("mean", report["rank"], _mean(report["steps"])) for report in ranks]
    steps.append(("mean", "all", _mean(_all_steps(found))))
    rows = [[str(step), str(rank), *(_ms(times[name]) for name in TIMES)] for step, rank, times in steps]
    return ["step", "rank", "step ms", *TIMES[1:]], rows


def shares_text(found: dict[str, Any]) -> str:
    """Returns a text with a profile's percentages of compute, exposed communication and idle time in the mean step."""
    mean = _mean(_all_steps(found))
    total = mean["seconds"] or 1.0
    return (
        f"mean step: {mean['compute'] / total:.1%} compute, {mean['exposed'] / total:.1%} exposed communication, "
        f"{mean['idle'] / total:.1%} idle"
    )


def operators_table(found: dict[str, Any], top: int) -> Table:
    """Returns a table of the `top` longest operators: calls and time per step, as means over steps and ranks."""
    steps = len(_all_steps(found)) or 1
    seconds = sum(times["seconds"] for times in _all_steps(found)) or 1.0
    rows = [
        [name, round(sums["calls"] / steps, 1), _ms(sums["seconds"] / steps), round(100 * sums["seconds"] / seconds, 1)]
        for name, sums in _summed(found, "operators", top)
    ]
    return ["operator", "calls", "ms", "% of the step"], rows


def collectives_table(found: dict[str, Any], top: int) -> Table:
    """Returns a table of the `top` longest collectives: calls, input size and time per step.

    The numbers are means over steps and ranks.
    """
    steps = len(_all_steps(found)) or 1
    rows = [
        [
            name,
            round(sums["calls"] / steps, 1),
            "-" if sums["unknown"] else byte_size(sums["bytes"] / steps),
            _ms(sums["seconds"] / steps),
            _ms(sums["exposed"] / steps),
        ]
        for name, sums in _summed(found, "collectives", top)
    ]
    return ["collective", "calls", "input", "ms", "exposed"], rows


def memory_table(found: dict[str, Any]) -> Table:
    """Returns a table of each rank's peak memory, and of the memory of each category at the time of the peak."""
    peaks = [(report["rank"], report["memory"]) for report in found["per_rank"]]
    seen = [name for name in CATEGORIES if any(memory["at_peak_bytes"].get(name) for _, memory in peaks)]
    rows = [
        [
            str(rank),
            byte_size(memory["peak_bytes"]),
            *(byte_size(memory["at_peak_bytes"].get(name, 0)) for name in seen),
        ]
        for rank, memory in peaks
    ]
    return ["rank", "peak", *seen], rows


def warmup_text(found: dict[str, Any]) -> str:
    """Returns a text with a profile's times of the first step, of later steps and of recorded steps."""
    times = found["warmup"]
    text = f"first step {times['first_step_seconds']:.3g} s"
    if times["steady_step_seconds"] is not None:
        speed = times["steady_tokens_per_second"]
        text += f", later steps {times['steady_step_seconds']:.3g} s"
        text += f" ({speed:,.0f} tokens/s)" if speed is not None else ""
    return f"{text}; recorded steps {times['recorded_step_seconds']:.3g} s"


def page(found: dict[str, Any], folder: Path) -> str:
    """Returns the content of profile.html.

    Args:
        found: the content of `profile.json`.
        folder: folder with the pictures of each rank's memory, which the page includes.
    """
    return render(
        "profile.html.j2",
        found=found,
        warmup=warmup_text(found),
        shares=shares_text(found),
        tables=[
            (title, (header, [[cell(value) for value in row] for row in rows]))
            for title, (header, rows) in tables(found, top=30).items()
        ],
        pictures=[(folder / report["memory_picture"]).read_text("utf-8") for report in found["per_rank"][:SHOWN_RANKS]],
        weft=weft.__version__,
    )


def _all_steps(found: dict[str, Any]) -> list[dict[str, float]]:
    return [times for report in found["per_rank"] for times in report["steps"]]


def _mean(steps: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean([times[name] for times in steps] or [0.0]) for name in TIMES}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _summed(found: dict[str, Any], key: str, top: int) -> list[tuple[str, Counter[str]]]:
    """Sums the entries `found["per_rank"][...][key]` of all ranks by name. Returns the `top` entries with most seconds.

    Long names are truncated.
    """
    sums: dict[str, Counter[str]] = {}
    for work in (work for report in found["per_rank"] for work in report[key]):
        total = sums.setdefault(work["name"], Counter())
        total.update({part: work.get(part, 0) for part in ("calls", "seconds", "exposed", "bytes")})
        total["unknown"] += "bytes" not in work
    longest = sorted(sums.items(), key=lambda item: (-item[1]["seconds"], item[0]))[:top]
    return [(name if len(name) <= 60 else f"{name[:57]}...", total) for name, total in longest]

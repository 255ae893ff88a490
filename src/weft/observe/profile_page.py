"""What is shown of a profile (`profile.json` as plain data): tables for the terminal, a page for a browser."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import weft
from weft.formatting import byte_size, cell
from weft.observe.memory import CATEGORIES
from weft.observe.report import render

TIMES = ("seconds", "compute", "communication", "exposed", "idle", "data")
SHOWN_RANKS = 8  # more than these have a line each, their mean, and no picture on the page
TOP = 12

Table = tuple[list[str], list[list[Any]]]


def steps_table(found: dict[str, Any]) -> Table:
    """Milliseconds by step and rank (of many ranks: by rank), and their mean."""
    ranks = found["per_rank"]
    header = ["step", "rank", "step ms", "compute", "communication", "exposed", "idle", "data"]
    rows: list[list[Any]] = []
    if len(ranks) <= SHOWN_RANKS:
        steps = [(times, report["rank"]) for report in ranks for times in report["steps"]]
        for times, rank in sorted(steps, key=lambda pair: (pair[0]["step"], pair[1])):
            rows.append([str(times["step"]), str(rank), *_milliseconds(times)])
    else:
        for report in ranks:
            rows.append(["mean", str(report["rank"]), *_milliseconds(_mean(report["steps"]))])
    rows.append(["mean", "all", *_milliseconds(_mean(times for report in ranks for times in report["steps"]))])
    return header, rows


def shares_text(found: dict[str, Any]) -> str:
    """The three parts of the mean step, in a sentence."""
    mean = _mean(times for report in found["per_rank"] for times in report["steps"])
    whole = mean["seconds"] or 1.0
    return (
        f"of a step {mean['compute'] / whole:.1%} compute, {mean['exposed'] / whole:.1%} exposed communication, "
        f"{mean['idle'] / whole:.1%} idle"
    )


def operators_table(found: dict[str, Any], top: int = TOP) -> Table:
    """What the time was spent in, mean of a step and rank."""
    steps = sum(len(report["steps"]) for report in found["per_rank"]) or 1
    whole = sum(times["seconds"] for report in found["per_rank"] for times in report["steps"]) or 1.0
    rows = [
        [_cut(name), round(sums["calls"] / steps, 1), _ms(sums["seconds"] / steps), _percent(sums["seconds"] / whole)]
        for name, sums in _summed(found, "operators")[:top]
    ]
    return ["operator", "calls", "ms", "% of the step"], rows


def collectives_table(found: dict[str, Any], top: int = TOP) -> Table:
    """What the ranks said to one another, mean of a step and rank."""
    steps = sum(len(report["steps"]) for report in found["per_rank"]) or 1
    rows = [
        [
            _cut(name),
            round(sums["calls"] / steps, 1),
            byte_size(sums["bytes"] / steps) if sums["known"] else "-",
            _ms(sums["seconds"] / steps),
            _ms(sums["exposed"] / steps),
        ]
        for name, sums in _summed(found, "collectives")[:top]
    ]
    return ["collective", "calls", "given", "ms", "exposed"], rows


def memory_table(found: dict[str, Any]) -> Table:
    """The greatest memory of each rank, and what it was for at that moment."""
    seen = [
        name for name in CATEGORIES if any(report["memory"]["at_peak_bytes"].get(name) for report in found["per_rank"])
    ]
    rows = [
        [
            str(report["rank"]),
            byte_size(report["memory"]["peak_bytes"]),
            *(byte_size(report["memory"]["at_peak_bytes"].get(name, 0)) for name in seen),
        ]
        for report in found["per_rank"]
    ]
    return ["rank", "peak", *seen], rows


def warmup_text(found: dict[str, Any]) -> str:
    """The warm-up against the steady state, in a sentence."""
    times = found["warmup"]
    text = f"first step {times['first_step_seconds']:.3g} s"
    if times["steady_step_seconds"] is not None:
        text += (
            f", then {times['steady_step_seconds']:.3g} s a step ({times['steady_tokens_per_second']:,.0f} tokens/s)"
        )
    return f"{text}; {times['recorded_step_seconds']:.3g} s while it was recorded"


def page(found: dict[str, Any], folder: Path) -> str:
    """profile.html, with the pictures that are in `folder` on it."""
    pictures = [
        (folder / report["memory_picture"]).read_text(encoding="utf-8") for report in found["per_rank"][:SHOWN_RANKS]
    ]
    tables = [
        ("Milliseconds of each step", steps_table(found)),
        ("Operators", operators_table(found, 30)),
        ("Collectives", collectives_table(found, 30)),
        ("Memory", memory_table(found)),
    ]
    return render(
        "profile.html.j2",
        found=found,
        warmup=warmup_text(found),
        shares=shares_text(found),
        tables=[
            (title, (header, [[cell(value) for value in row] for row in rows])) for title, (header, rows) in tables
        ],
        pictures=pictures,
        weft=weft.__version__,
    )


def _mean(steps: Iterable[dict[str, float]]) -> dict[str, float]:
    steps = list(steps)
    return {name: statistics.fmean(times[name] for times in steps) if steps else 0.0 for name in TIMES}


def _milliseconds(times: dict[str, float]) -> list[float]:
    return [_ms(times[name]) for name in TIMES]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _percent(share: float) -> float:
    return round(100 * share, 1)


def _cut(name: str, width: int = 60) -> str:
    return name if len(name) <= width else f"{name[: width - 3]}..."


def _summed(found: dict[str, Any], key: str) -> Sequence[tuple[str, dict[str, Any]]]:
    """Rows of all ranks with one name added up, the longest first."""
    sums: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"calls": 0, "seconds": 0.0, "exposed": 0.0, "bytes": 0, "known": True}
    )
    for report in found["per_rank"]:
        for work in report[key]:
            sum_ = sums[work["name"]]
            sum_["known"] = sum_["known"] and "bytes" in work
            for part in ("calls", "seconds", "exposed", "bytes"):
                sum_[part] += work.get(part, 0)
    return sorted(sums.items(), key=lambda item: (-item[1]["seconds"], item[0]))

"""Summarizes the measurements of `weft bench serve`, and writes its page."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

import weft
from weft.errors import UserError
from weft.files import replace_file, report_write_errors
from weft.observe.charts import Plot, Series, draw
from weft.observe.console import Console
from weft.observe.manifest import now
from weft.observe.report import render
from weft.serve.bench import Load, Measured

PERCENTILES = (50, 90, 99)
MEASURES = {
    "first_token": "time to the first token, ms",
    "per_token": "time per further token, ms",
    "longest_gap": "longest wait between two pieces, ms",
    "request": "complete request, ms",
}
DEFINITION = (
    "Times count from the start of a request; with a rate, from the time at which the request was due. Time per "
    "further token: from the first to the last piece of the text, divided by the number of new tokens less one. "
    "Throughput: new tokens of the successful requests, divided by the time from the start of the first request to the "
    "end of the last one."
)


def summarize(load: Load, measured: Sequence[Measured]) -> dict[str, Any]:
    """Returns the numbers of a measurement: counts, throughput, and percentiles in milliseconds by name.

    Raises:
        UserError: no request has ended.
    """
    if not measured:
        raise UserError("no request has ended; give the server more time")
    good = [one for one in measured if one.error is None]
    seconds = max(one.end for one in measured) - min(one.begin for one in measured)
    times = {name: sorted(_times(good, name)) for name in MEASURES}
    return {
        "url": load.url,
        "model": load.model,
        "rate": load.rate,
        "concurrency": load.concurrency,
        "requests": len(measured),
        "failed": len(measured) - len(good),
        "errors": dict(Counter(one.error for one in measured if one.error is not None).most_common()),
        "seconds": seconds,
        "prompt_tokens": sum(one.prompt_tokens for one in good),
        "new_tokens": sum(one.new_tokens for one in good),
        "requests_per_second": len(good) / seconds,
        "new_tokens_per_second": sum(one.new_tokens for one in good) / seconds,
        "milliseconds": {
            name: {f"p{p}": round(1e3 * percentile(values, p), 2) for p in PERCENTILES}
            | {"mean": round(1e3 * sum(values) / len(values), 2)}
            for name, values in times.items()
            if values
        },
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the least of the sorted values that is at least as great as `percent` of them (the nearest rank)."""
    return values[max(0, math.ceil(len(values) * percent / 100) - 1)]


def _times(good: Sequence[Measured], name: str) -> list[float]:
    """Returns the seconds of a measure of MEASURES, for the requests that have it, in the order of the requests."""
    if name == "first_token":
        return [one.arrivals[0] - one.begin for one in good if one.arrivals]
    if name == "per_token":
        several = [one for one in good if one.new_tokens > 1 and len(one.arrivals) > 1]
        return [(one.arrivals[-1] - one.arrivals[0]) / (one.new_tokens - 1) for one in several]
    if name == "longest_gap":
        several = [one.arrivals for one in good if len(one.arrivals) > 1]
        return [max(b - a for a, b in pairwise(times)) for times in several]
    return [one.end - one.begin for one in good]


def _rows(summary: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    header = ["", *(f"p{p}" for p in PERCENTILES), "mean"]
    found = summary["milliseconds"]
    return header, [[text, *found[name].values()] for name, text in MEASURES.items() if name in found]


def print_summary(summary: dict[str, Any], console: Console, *, json_only: bool) -> None:
    """Prints the numbers of `summarize` on stdout, as a table or as JSON."""
    if json_only:
        console.result(json.dumps(summary, indent=2))
        return
    console.result(f"{summary['model']} at {summary['url']}, {_load_text(summary)}")
    console.table(*_rows(summary))
    console.result(", ".join(f"{value} {label}" for label, value in _tiles(summary)))
    for error, count in summary["errors"].items():
        console.result(f"failed: {count:,} x {error}")


def _load_text(summary: dict[str, Any]) -> str:
    if summary["rate"] is not None:
        return f"{summary['requests']:,} requests, {summary['rate']:g} per second"
    return f"{summary['requests']:,} requests, {summary['concurrency']:,} at a time"


def _tiles(summary: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("new tokens/s", f"{summary['new_tokens_per_second']:,.1f}"),
        ("requests/s", f"{summary['requests_per_second']:,.2f}"),
        ("seconds", f"{summary['seconds']:,.1f}"),
        ("failed", f"{summary['failed']:,}"),
    ]


def write_report(out: str | Path, summary: dict[str, Any], measured: Sequence[Measured], console: Console) -> None:
    """Writes load.json (the summary), requests.jsonl (each request) and load.html (plots) to a folder.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = Path(out)
    good = [one for one in measured if one.error is None]
    charts = [chart for plot in _plots(good) if (chart := draw(plot)) is not None]
    header, rows = _rows(summary)
    page = render(
        "load.html.j2",
        summary=summary,
        load=f"{summary['url']} · {_load_text(summary)}",
        tiles=_tiles(summary),
        charts=charts,
        readouts={chart.plot.key: chart.readout for chart in charts},
        unit="",
        header=header,
        rows=rows,
        definition=DEFINITION,
        made=now().replace("T", " "),
        weft=weft.__version__,
    )
    with report_write_errors(folder, "free space and run the command again"):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "load.json", json.dumps(summary, indent=2).encode())
        replace_file(folder / "requests.jsonl", b"".join(orjson.dumps(asdict(one)) + b"\n" for one in measured))
        replace_file(folder / "load.html", page.encode("utf-8", "replace"))
    console.line(f"{folder / 'load.html'}: open it in a browser")


def _plots(good: Sequence[Measured]) -> list[Plot]:
    """Returns the charts: percentiles of the times, and the time to the first token of each request."""
    percents = range(1, 101)

    def text(milliseconds: float) -> str:
        return f"{milliseconds:,.1f} ms"

    first, request = (sorted(_times(good, name)) for name in ("first_token", "request"))
    curves = [
        Series(name, list(percents), [1e3 * percentile(times, p) for p in percents], kind)
        for name, times, kind in (("first token", first, "train"), ("request", request, "validation"))
        if times
    ]
    each = [1e3 * value for value in _times(good, "first_token")]
    return [
        Plot("percentiles", "Milliseconds by percentile of the requests", curves, text, allow_log=True),
        Plot(
            "first",
            "Milliseconds to the first token, by request in the order of their start",
            [Series("first token", list(range(1, len(each) + 1)), each)],
            text,
            from_zero=True,
        ),
    ]

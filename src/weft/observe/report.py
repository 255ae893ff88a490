"""Writes `report.html`, a self-contained page about a run."""

from __future__ import annotations

import math
import re
import statistics
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import weft
from weft.errors import UserError
from weft.files import read_json, replace_file, report_write_errors
from weft.formatting import amount, byte_size, counted, duration, flat, flops_rate, timing
from weft.observe.charts import Plot, Series, draw
from weft.observe.events import read_events
from weft.observe.flops import DEFINITION
from weft.observe.manifest import MANIFEST, now, read_manifest
from weft.observe.metrics import METRICS, NAMES, read_metrics, read_samples

if TYPE_CHECKING:
    from jinja2 import Environment

REPORT = "report.html"
CONFIG = "config.yaml"
EXAMPLE = "example.json"
OBJECTIVE = re.compile(r"^objective:.*(?:\n(?:[ \t].*)?)*", re.M)  # a section of a config file
QUANTILE = re.compile(r"_p\d+$")  # such as the 90th percentile `reward_p90`, in one chart with the mean `reward`
# Metrics without a chart of their own name.
KNOWN = NAMES | {"validation_loss", "validation_bits_per_byte"}


def build_report(run_directory: str | Path) -> Path:
    """Writes `<run>/report.html` from the files of the run directory; the run may still be training.

    Returns:
        The path of the page, which needs no network and no other file.

    Raises:
        UserError: the directory is not a run directory, a file in the directory is damaged, or the page cannot be
            written.
    """
    run = Path(run_directory)
    if not run.is_dir():
        raise UserError("no such run directory; give the folder that `weft train` created", run)
    if not any((run / name).exists() for name in (METRICS, MANIFEST, CONFIG)):
        raise UserError(f"not a run directory: it has no {METRICS}, {MANIFEST} or {CONFIG}; check the path", run)
    page, path = render("report.html.j2", **gather(run)), run / REPORT
    with report_write_errors(path, "free space and run the command again"):
        replace_file(path, page.encode("utf-8", "replace"))
    return path


def render(template: str, **values: Any) -> str:
    """Renders an HTML template from this module's folder with the given values. HTML in values is escaped."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    """Returns the environment of the templates, which keeps each template that it has compiled."""
    from jinja2 import Environment, FileSystemLoader  # imported only where a page is made

    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)


def gather(run: Path) -> dict[str, Any]:
    """Returns the values for the report's template, as plain data and charts."""
    metrics, manifest = read_metrics(run), read_manifest(run)
    sessions = manifest.get("sessions", [])
    resumes = [s["step"] for s in sessions if isinstance(s.get("step"), int) and s["step"] > 0]
    config = run / CONFIG
    text = config.read_text(encoding="utf-8", errors="replace") if config.exists() else None
    unit = loss_unit(text)
    events = [(event["step"], event["text"]) for event in read_events(run)]
    drawn = (draw(plot, resumes, events if plot.key == "loss" else ()) for plot in plots(metrics, manifest, unit))
    charts = [chart for chart in drawn if chart is not None]
    samples: dict[int, list[dict[str, str]]] = {}
    for sample in read_samples(run):
        texts = {key: str(sample.get(key, "")) for key in ("prompt", "text")}
        samples.setdefault(sample["step"], []).append(texts)
    return {
        "name": manifest.get("name") or run.resolve().name,
        "directory": str(run),
        "status": status(metrics, manifest),
        "manifest": manifest,
        "sessions": sessions,
        "resumes": resumes,
        "tiles": tiles(metrics, manifest, unit),
        "charts": charts,
        "per_point": max((curve.per_point for chart in charts for curve in chart.curves), default=1),
        "readouts": {chart.plot.key: chart.readout for chart in charts},
        "definition": DEFINITION,
        "peak": peak_text(manifest),
        "example": read_json(run / EXAMPLE) if (run / EXAMPLE).exists() else None,
        "samples": dict(sorted(samples.items(), reverse=True)),
        "config": text,
        "facts": facts(manifest),
        "lines": len(metrics),
        "weft": weft.__version__,
        "made": now().replace("T", " "),
    }


def loss_unit(config: str | None) -> str:
    """Returns the unit of the loss as text after a label; "" if the objective is not known to have a unit.

    Args:
        config: the text of `config.yaml`.
    """
    from ruamel.yaml import YAML, YAMLError

    section = OBJECTIVE.search(config or "")  # to parse the whole file would take a third of the page's time
    try:
        sections = YAML(typ="safe", pure=True).load(section[0] if section else config or "")
    except YAMLError:
        return ""  # the page shows a damaged file as it is
    objective = sections.get("objective") if isinstance(sections, dict) else None
    name = objective.get("type") if isinstance(objective, dict) else objective
    return ", nats per token" if name in ("pretrain", "sft") else ""


def plots(metrics: list[dict[str, Any]], manifest: dict[str, Any], unit: str) -> list[Plot]:
    """Returns the charts of the page: one for each built-in metric, then one for each custom metric."""

    def series(key: str, name: str, scale: float = 1.0, **more: Any) -> Series:
        rows = [(m["step"], m[key] * scale) for m in metrics if isinstance(m.get(key), int | float)]
        return Series(name, [s for s, _ in rows], [v for _, v in rows], **more)

    loss = [series("loss", "loss", smooth=True), series("validation_loss", "validation", kind="validation")]
    norm = [series("grad_norm", "norm")]
    speed = [series("tokens_per_second", "tokens/s")]
    memory = [series("memory_bytes", "memory", 1e-9)]
    bits = [series("validation_bits_per_byte", "bits per byte", kind="validation")]
    note = str(manifest.get("memory_kind") or "")
    every = [
        Plot("loss", f"Loss{unit}", loss, "{:.4f}".format, width=1136, height=380),
        Plot("lr", "Learning rate", [series("lr", "lr")], "{:.3e}".format, from_zero=True),
        Plot("grad_norm", "Gradient norm, before clipping", norm, "{:.4g}".format, from_zero=True, allow_log=True),
        Plot("speed", "Tokens per second, all ranks", speed, "{:,.0f}".format, from_zero=True),
        Plot("mfu", "MFU, percent", [series("mfu", "MFU", 100.0)], "{:.1f}%".format, "{:g}%".format, from_zero=True),
        Plot("memory", "Peak memory, GB", memory, "{:,.2f} GB".format, from_zero=True, note=note),
        Plot("bits", "Validation, bits per byte", bits, "{:.4f}".format),
    ]
    named = {name.removeprefix("validation_") for line in metrics for name in line if name not in KNOWN}
    for number, name in enumerate(sorted({QUANTILE.sub("", name) for name in named})):
        quantiles = [
            series(one, one) for one in sorted(named) if QUANTILE.search(one) and QUANTILE.sub("", one) == name
        ]
        both = [series(name, name), *quantiles, series(f"validation_{name}", "validation", kind="validation")]
        every.append(Plot(f"named-{number}", name, [one for one in both if one.values], "{:.5g}".format))
    return every


def tiles(metrics: list[dict[str, Any]], manifest: dict[str, Any], unit: str) -> list[dict[str, str]]:
    """Returns the headline numbers of the page, each with label, value and note."""
    found: list[dict[str, str]] = []

    def tile(label: str, value: str, note: str = "") -> None:
        found.append({"label": label, "value": value, "note": note})

    def last(key: str) -> tuple[float, int] | None:
        return next(((m[key], m["step"]) for m in reversed(metrics) if isinstance(m.get(key), int | float)), None)

    def median(key: str) -> float | None:
        lines = [m for m in metrics if _finite(m.get(key))]
        # Lines with the first step of a session include compilation; they are used only without other lines.
        values = [m[key] for m in lines if "warmup_seconds" not in m] or [m[key] for m in lines]
        return statistics.median(values) if values else None

    if (loss := last("loss")) is not None:
        tile("Loss", f"{loss[0]:.4f}", f"at step {loss[1]:,}{unit}")
    if (held_out := last("validation_loss")) is not None:
        best = min((m["validation_loss"] for m in metrics if _finite(m.get("validation_loss"))), default=None)
        note = f"at step {held_out[1]:,}"
        tile("Validation loss", f"{held_out[0]:.4f}", note if best is None else f"{note}; best {best:.4f}")
    if (bits := last("validation_bits_per_byte")) is not None:
        tile("Bits per byte", f"{bits[0]:.3f}", f"held out, at step {bits[1]:,}")
    if (tokens := last("tokens")) is not None:
        planned = [n for n in (manifest.get("steps"), manifest.get("tokens_per_step")) if isinstance(n, int)]
        of = f"of {amount(math.prod(planned), 1e6)} planned" if len(planned) == 2 else ""
        tile("Tokens", amount(tokens[0], 1e6), of)
    if (speed := median("tokens_per_second")) is not None:
        tile("Tokens/s", f"{speed:,.0f}", "median, whole job")
    if (warmup := last("warmup_seconds")) is not None:
        steady = median("step_seconds")
        tile("Warm-up", timing(warmup[0]), "first step" + (f"; then {timing(steady)} a step" if steady else ""))
    if (used := median("mfu")) is not None:
        peak = peak_text(manifest, brief=True)
        tile("MFU", f"{used:.1%}", f"median; peak {peak}" if peak else "median")
    if memory := [m["memory_bytes"] for m in metrics if _finite(m.get("memory_bytes"))]:
        tile("Peak memory", byte_size(max(memory), "GB"), str(manifest.get("memory_kind", "")))
    if (parameters := manifest.get("parameters")) is not None:
        tile("Parameters", amount(parameters, 1e6))
    if (wall := wall_seconds(manifest)) is not None:
        tile("Wall time", duration(wall), counted(len(manifest["sessions"]), "session"))
    elif metrics and (seconds := step_seconds(metrics)):
        tile("Time in steps", duration(seconds), "without validation and saving")
    return found


def wall_seconds(manifest: dict[str, Any]) -> float | None:
    """Returns the total duration of all sessions in seconds; None if a session has no end.

    A session has no end if it is still running or was killed.
    """
    total = 0.0
    for session in manifest.get("sessions", []):
        try:
            begun, ended = (datetime.fromisoformat(session[key]) for key in ("started", "ended"))
        except (KeyError, TypeError, ValueError):
            return None
        total += (ended - begun).total_seconds()
    return total if manifest.get("sessions") else None


def step_seconds(metrics: list[dict[str, Any]]) -> float:
    """Returns the seconds spent in steps.

    For each line of metrics, this adds the mean step time, multiplied by the number of steps since the previous line.
    """
    total, before = 0.0, 0
    for line in metrics:
        if _finite(line.get("step_seconds")):
            total += line["step_seconds"] * (line["step"] - before)
        before = line["step"]
    return total


def status(metrics: list[dict[str, Any]], manifest: dict[str, Any]) -> str:
    """Returns the status of the run as text, with the number of steps made."""
    step, steps = (metrics[-1]["step"] if metrics else 0), manifest.get("steps")
    last = (manifest.get("sessions") or [{}])[-1].get("status")
    if last == "finished" or (steps is not None and step >= steps):
        return f"finished: {counted(step, 'step')}"
    so_far = f"step {step:,} of {steps:,}" if isinstance(steps, int) else f"step {step:,}"
    return f"{last or 'unfinished'}: {so_far}"


def peak_text(manifest: dict[str, Any], brief: bool = False) -> str:
    """Returns the peak FLOP/s from which the MFU is computed, with its origin; "" if the manifest has no peak.

    Args:
        brief: whether to shorten the origin to "measured" or "from the table".
    """
    peak, origin = manifest.get("peak_flops_per_second"), str(manifest.get("peak_origin", ""))
    if not _finite(peak) or not peak:
        return ""
    rate = flops_rate(peak)
    if brief:
        return f"{rate}, {'measured' if 'measured' in origin else 'from the table'}"
    return f"{rate} over all devices used ({origin})"


def facts(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the manifest as (dotted key, value) rows, except the sessions, which have their own table."""
    rows: list[tuple[str, str]] = []
    for key, value in flat({key: value for key, value in manifest.items() if key != "sessions"}).items():
        if value is not None and value != []:
            listed = ", ".join(map(str, value)) if isinstance(value, list) else value
            rows.append((key, f"{listed:,}" if isinstance(listed, int) and abs(listed) > 9999 else str(listed)))
    return rows


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

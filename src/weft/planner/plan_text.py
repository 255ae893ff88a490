"""Plans as text for people, and as a run file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.config.dump import dump_section
from weft.config.inherit import read_tree
from weft.config.run import RunConfig
from weft.errors import UserError
from weft.files import replace_file, report_write_errors
from weft.formatting import amount, byte_size, counted, duration, timing
from weft.planner.candidates import PLANNED
from weft.planner.hardware import Hardware
from weft.planner.plan import RunPlan, RunPlans, capacity, part_name

MARK = "# Written by weft plan"


def plans_text(plans: RunPlans, title: str, hardware: Hardware) -> str:
    """Returns the table of the plans, the first plan in detail, why the second is slower, and near misses."""
    best, lines = plans.best[0], [title, ""]
    lines += table([_row(number, plan) for number, plan in enumerate(plans.best, 1)], HEAD)
    lines += ["", *_details(best, hardware)]
    if plans.reason is not None:
        lines.append(f"  runner-up   plan 2 is {plans.reason}")
    if plans.near:
        lines += ["", "faster, but too large for the device's memory:"]
        rows = [[*_row(number, plan), f"+{byte_size(plan.excess)}"] for number, plan in enumerate(plans.near, 1)]
        lines += table(rows, [*HEAD, "too much"])
    return "\n".join(lines)


HEAD = ["", "mesh", "micro", "recompute", "other keys", "memory", "step", "tokens/s", "MFU", "days"]


def _row(number: int, plan: RunPlan) -> list[str]:
    others = [f"{key}: {_short(value)}" for key, value in plan.parallel.items() if key not in plan.axes]
    costs, training, predicted = plan.costs(), plan.training, plan.prediction
    return [
        str(number),
        " ".join(f"{axis} {size}" for axis, size in plan.axes.items() if size > 1) or "one rank",
        str(training["micro_batch_size"]),
        training["activation_checkpointing"],
        ", ".join(others) or "-",
        byte_size(plan.memory.total, "GB"),
        timing(predicted.step_seconds),
        amount(round(predicted.tokens_per_second)),
        f"{predicted.mfu:.1%}",
        days_text(costs["days"]) if costs else "-",
    ]


def days_text(days: float) -> str:
    """Returns a number of days with four digits, and at least all of its integer part; `< 0.01` below that."""
    return "< 0.01" if days < 0.01 else f"{days:,.0f}" if days >= 1000 else f"{days:.4g}"


def _short(value: Any) -> str:
    """Returns a value as YAML; a long list of layers by its first and last numbers."""
    if isinstance(value, list) and len(value) > 6:
        return f"[{value[0]}, {value[1]}, ... {value[-1]}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _details(plan: RunPlan, hardware: Hardware) -> list[str]:
    predicted, costs = plan.prediction, plan.costs()
    worst = max(range(len(plan.ranks)), key=lambda rank: plan.ranks[rank].total)
    where = f", pipeline rank {worst}" if len(plan.ranks) > 1 else ""
    lines = [f"plan 1: {plan.parallel}"]
    used = plan.memory.total / capacity(hardware)
    lines.append(
        f"  memory      {byte_size(plan.memory.total)} of {hardware.device.memory_gb:g} GB ({used:.0%}{where})"
    )
    if plan.excess > 0:
        lines.append(f"  does not fit: {byte_size(plan.excess)} too much")
    lines += _parts(plan.memory.parts(), byte_size)
    lines.append(f"  step        {timing(predicted.step_seconds)}, {predicted.samples_per_second:,.4g} sequences/s")
    lines += _parts({part_name(name): value for name, value in predicted.parts.items()}, timing)
    if costs:
        days, hours = costs["days"], costs["gpu_hours"]
        time = duration(days * 86_400) if days < 1 else f"{days_text(days)} days"
        run = f"{counted(plan.steps or 0, 'step')}, {time}, {amount(round(hours)) if hours >= 10 else f'{hours:.2g}'}"
        price = f", price {costs['price']:,.0f}" if "price" in costs else ""
        lines.append(f"  run         {run} device-hours, {costs['energy_mwh']:,.4g} MWh of the devices{price}")
    return lines


def _parts(parts: Mapping[str, float], text) -> list[str]:
    total = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda one: -one[1])
    return [f"    {name:26}{text(value):>10}{value / total:>7.1%}" for name, value in ordered if value > 0]


def table(rows: Sequence[Sequence[str]], head: Sequence[str]) -> list[str]:
    """Returns the lines of a table, whose numbers are aligned to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    left = {"mesh", "recompute", "other keys", "law", "source"}
    return [
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for cell, width, name in zip(row, widths, head, strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]


def check_out(out: Path) -> None:
    """Raises UserError if `out` is a file that `write_plan` would not replace."""
    if out.exists() and not out.read_text(errors="replace").startswith(MARK):
        raise UserError(f"{out}: this file exists and is not a plan; choose another name for --apply")


def write_plan(plan: RunPlan, file: str, out: Path) -> None:
    """Writes a run file that extends another and has the keys of a plan.

    Args:
        file: the run file that was planned.
        out: the file to write; an earlier plan is replaced.

    Raises:
        UserError: the path is that of another file, cannot be written, or the written file is not valid.
    """
    check_out(out)
    tree, _ = read_tree(Path(file), [], [])
    written = tree.get("parallel") if tree is not None else None
    old = set(written.value) if written is not None and written.is_mapping else set()
    section, keys = plan.config.parallel.model_dump(mode="json"), dict(plan.parallel)
    keys |= {name: section[name] for name in PLANNED if name in old and name not in keys}
    if plan.config.parallel.auto:  # else the run would be planned again
        keys |= {"auto": False, "hardware": None}
    base = os.path.relpath(os.path.realpath(file), os.path.realpath(out.parent))
    what = f"{counted(plan.devices, 'device')}, {plan.hardware.device.name}"
    text = f"{MARK}: {what}\nextends: {base}\n{dump_section('parallel', keys)}{dump_section('training', plan.training)}"
    with report_write_errors(out):
        replace_file(out, text)
    RunConfig.load(out, check_data=False, ranks=plan.devices)

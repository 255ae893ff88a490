"""Texts about plans for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.formatting import byte_size, timing
from weft.planner.parallelize.placements import placement_text

ROOT = "(all)"  # the pattern "" matches the module itself
FULL = "full"  # first word of the keys of notes about operations that run on full tensors
TOPICS = {
    "parameters": "parameters, split over the tensor axes",
    "inputs": "redistributed where a module begins",
    "outputs": "redistributed where a module ends",
    "islands": "on plain tensors (cannot be captured)",
}


def explain(plan: Any) -> str:
    """Returns the mesh, the predictions and the tables of a plan, one line for each pattern, with reason and cost."""
    lines = [f"mesh       {plan} = {plan.devices} devices"]
    if plan.notes.get("hardware"):
        lines.append(f"hardware   {plan.notes['hardware']}")
    how = "sharded over dp" if plan.shard_parameters and plan.dp > 1 else "replicated over dp"
    if plan.shard_parameters and plan.dp > 1 and not plan.reshard_after_forward and not plan.stages:
        how += ", gathered once in a step"
    lines.append(f"parameters {how}" + (", split as below" if plan.parameters else ""))
    lines += _predictions(plan.prediction)
    if plan.stages:
        lines.append(f"pipeline   {plan.schedule}, {plan.micro_batches} micro-batches, {len(plan.stages)} stages")
        for number, (begin, names) in enumerate(plan.stages):
            note = plan.notes.get(f"stages {number}", "")
            where = f"begins with {begin}" if begin else "begins the forward"
            lines.append(f"  stage {number}  {where}; has {', '.join(names)}" + (f"  ({note})" if note else ""))
    if plan.recompute:
        lines.append(f"recompute  {', '.join(plan.recompute)}: activations are computed again in backward")
    for topic, title in TOPICS.items():
        table = getattr(plan, topic)
        if not table:
            continue
        lines += ["", title]
        width = max(len(pattern or ROOT) for pattern in table)
        for pattern, value in table.items():
            text = value if isinstance(value, str) else placement_text(value)
            lines.append(f"  {pattern or ROOT:{width}}  {text:12}  {plan.notes.get(f'{topic} {pattern}', '')}".rstrip())
    full = [text for name, text in plan.notes.items() if name.startswith(f"{FULL} ")]
    if full:
        lines += ["", "on full tensors, on all ranks (DTensor cannot shard them)", *(f"  {text}" for text in full)]
    if plan.notes.get("searched"):
        lines += ["", f"searched   {plan.notes['searched']}"]
    return "\n".join(lines)


def _predictions(found: Mapping[str, float]) -> list[str]:
    lines = []
    if "step_seconds" in found:
        parts = [
            f"{name} {timing(found[f'{name}_seconds'])}"
            for name in ("compute", "tp", "dp", "pp", "bubble")
            if f"{name}_seconds" in found
        ]
        lines.append(f"step       {timing(found['step_seconds'])} predicted ({', '.join(parts)})")
    if "memory_bytes" in found:
        states = found.get("state_bytes", 0.0)
        lines.append(
            f"memory     {byte_size(found['memory_bytes'])} of each device ({byte_size(states)} parameters, gradients, "
            f"moments; {byte_size(found['memory_bytes'] - states)} activations)"
        )
    if found.get("optimality_gap", 0.0) > 1e-6:
        lines.append(f"gap        the best plan is at most {100 * found['optimality_gap']:.2g}% faster (time limit)")
    return lines


def difference(one: Any, two: Any) -> list[str]:
    """Returns what two plans do differently, one line for each difference; an empty list if nothing."""
    lines = []
    staged = ("schedule", "micro_batches") if one.stages or two.stages else ()  # elsewhere without effect
    for name in (
        "pp",
        "dp",
        "tp",
        "tp2",
        "shard_parameters",
        "reshard_after_forward",
        "recompute",
        "structure",
        *staged,
    ):
        first, second = getattr(one, name), getattr(two, name)
        if first != second:
            lines.append(f"{name}: {_plain(first)} -> {_plain(second)}")
    for number in range(max(len(one.stages), len(two.stages))):
        first, second = _stage(one, number), _stage(two, number)
        if first != second:
            lines.append(f"stage {number}: {first} -> {second}")
    for topic in TOPICS:
        first, second = getattr(one, topic), getattr(two, topic)
        for pattern in dict.fromkeys([*first, *second]):
            if first.get(pattern) != second.get(pattern):
                lines.append(f"{topic}: {pattern}: {_plain(first.get(pattern))} -> {_plain(second.get(pattern))}")
    for name in ("step_seconds", "memory_bytes"):
        if name in one.prediction and name in two.prediction and one.prediction[name] != two.prediction[name]:
            show = timing if name == "step_seconds" else byte_size
            lines.append(f"{name}: {show(one.prediction[name])} -> {show(two.prediction[name])}")
    return lines


def _stage(plan: Any, number: int) -> str:
    if number >= len(plan.stages):
        return "none"
    begin, names = plan.stages[number]
    return f"{begin or 'the forward'} ({', '.join(names)})"


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ", ".join(map(_plain, value)) or "none"
    return str(value) if isinstance(value, int | str) else placement_text(value)

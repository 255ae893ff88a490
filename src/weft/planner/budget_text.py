"""Compute-optimal sizes as text for people, and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from weft.formatting import amount
from weft.planner.budget import ParametricLaw, advice, optima, spread
from weft.planner.plan_text import table

HEAD = ["law", "parameters", "tokens", "tokens/parameter", "loss", "source"]


def budget_dict(flops: float, own: ParametricLaw | None = None) -> dict[str, Any]:
    """Returns the sizes by each law, their spread, and advice, as `weft plan --budget --json` prints them.

    Raises:
        UserError: the budget is absurd.
    """
    found = optima(flops, own)
    least, most, mean = spread(found)
    return {
        "budget": flops,
        "optima": [asdict(one) for one in found],
        "spread": {"least": least.parameters, "most": most.parameters, "mean": mean},
        "advice": [asdict(one) for one in advice(flops, mean, flops / 6 / mean)],
    }


def budget_text(flops: float, own: ParametricLaw | None = None) -> str:
    """Returns a table of the sizes by each law, their spread, and advice on learning rate and batch size.

    Raises:
        UserError: the budget is absurd.
    """
    found = optima(flops, own)
    least, most, mean = spread(found)
    rows = []
    for one in found:
        loss = "-" if one.loss is None else f"{one.loss:.3f}"
        sizes = amount(round(one.parameters)), amount(round(one.tokens)), f"{one.tokens_per_parameter:.1f}"
        rows.append([one.law, *sizes, loss, one.source])
    lines = [f"{flops:g} FLOPs", "", *table(rows, HEAD), ""]
    between = f"{amount(round(least.parameters))} to {amount(round(most.parameters))} parameters"
    lines.append(f"laws from 2022 on: models of {between}, geometric mean {amount(round(mean))}; advice for this mean:")
    for one in advice(flops, mean, flops / 6 / mean):
        batch = amount(round(one.batch_tokens))
        lines.append(f"  {one.rule:10} learning rate {one.learning_rate:.2e}, batch of {batch} tokens ({one.source})")
    return "\n".join(lines)

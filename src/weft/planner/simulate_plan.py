"""The simulated memory of a plan's ranks beside the memory that formulas predict, for people and as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.formatting import byte_size
from weft.planner.memory import Memory, memory_of
from weft.planner.plan import RunPlan, plan_dtype
from weft.planner.plan_text import table


@dataclass(frozen=True)
class Compared:
    """The memory of one rank.

    Attributes:
        rank: the rank.
        simulated: its memory by two steps of the real code on tensors without memory.
        formula: its memory by formulas, for the kernels that the simulated steps use.
    """

    rank: int
    simulated: Memory
    formula: Memory

    def as_dict(self) -> dict[str, Any]:
        """Returns the rank as plain data, as `weft plan --json` prints it."""
        found: dict[str, Any] = {"rank": self.rank}
        for name, memory in (("simulated", self.simulated), ("formula", self.formula)):
            parts = {part: round(size) for part, size in memory.parts().items() if part != "fragmentation"}
            found |= {f"{name}_bytes": round(memory.total), name: parts}
        return found


def simulate_plan(plan: RunPlan) -> list[Compared]:
    """Simulates rank 0 of a plan and the first rank of the pipeline stages that need most.

    Raises:
        UserError: the run cannot be simulated (see `weft.planner.simulate.simulate_rank`).
    """
    from weft.planner.simulate import simulate  # imports torch

    dtype, chunks = plan_dtype(plan), plan.hardware.device.kind == "cpu"
    config = plan.config.model_copy(
        update={"training": plan.config.training.model_copy(update={"dtype": dtype, "compile": False})}
    )
    ranks = memory_of(config, plan.devices, cpu=True, chunks=chunks)
    found = simulate(config, plan.devices, chunks=chunks)
    return [Compared(one.rank, one.memory, ranks[one.rank * len(ranks) // plan.devices]) for one in found]


def simulated_text(compared: list[Compared]) -> str:
    """Returns lines with a table of each rank by part; "" without ranks."""
    lines = []
    for one in compared:
        simulated, formula = one.simulated, one.formula
        error = formula.total / simulated.total - 1
        lines += ["", f"rank {one.rank}, two steps of the code without memory, with the kernels of a CPU:"]
        rows = [
            [part, byte_size(size), byte_size(formula.parts()[part])]
            for part, size in simulated.parts().items()
            if size or formula.parts()[part]
        ]
        rows.append(["total", byte_size(simulated.total), f"{byte_size(formula.total)} ({error:+.1%})"])
        lines += table(rows, ["", "simulated", "formula"])
    return "".join(f"{line}\n" for line in lines)

"""Chooses one option for each node of a graph, so that neighbors fit together, by an integer program.

The program has one 0/1 variable for each option. Its linear relaxation is tight on trees, so HiGHS needs few
branches for the graphs of models.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.errors import UserError


class State(NamedTuple):
    """The state of an output or of an input.

    Attributes:
        forward: must be equal at both ends of an edge.
        flags: what a consumer demands must be among what the producer offers, place by place.
    """

    forward: Hashable
    flags: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Option:
    """One option of a node: the states of its inputs and outputs, its cost and its memory."""

    inputs: tuple[State, ...]
    outputs: tuple[State | None, ...]
    cost: float
    memory: float = 0.0


@dataclass(frozen=True)
class Choice:
    """The solution of a problem.

    Attributes:
        options: the number of the option of each node.
        cost: sum of the costs.
        memory: sum of the memory.
        gap: largest relative difference from the optimum that is not ruled out.
    """

    options: tuple[int, ...]
    cost: float
    memory: float
    gap: float


Edge = tuple[int, int]  # node and number of its output


@dataclass
class Problem:
    """A graph of nodes with options.

    Attributes:
        options: of each node.
        inputs: of each node, the outputs that it takes, in the order of the inputs of its options.
        equal: pairs of outputs that must have the same state.
    """

    options: list[list[Option]]
    inputs: list[list[Edge]]
    equal: list[tuple[Edge, Edge]]


def solve(problem: Problem, memory: float | None = None, seconds: float = 10.0) -> Choice | None:
    """Returns the cheapest choice of options; None if there is none.

    Args:
        memory: upper limit of the sum of memory.
        seconds: time limit; the best choice that was found until then is returned.

    Raises:
        UserError: scipy is not installed.
    """
    if any(not options for options in problem.options):
        return None
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError:
        raise UserError("the search needs scipy; run: pip install 'weft-train[parallelize]'") from None

    rows = _Rows(problem)
    for place, options in enumerate(problem.options):
        rows.add({rows.first[place] + number: 1.0 for number in range(len(options))}, 1.0, 1.0)
    for place, inputs in enumerate(problem.inputs):
        for slot, edge in enumerate(inputs):
            rows.join(rows.states(edge), rows.states_in(place, slot), exact=False)
    for one, two in problem.equal:
        rows.join(rows.states(one), rows.states(two), exact=True)
    flat = [option for options in problem.options for option in options]
    scale = max((option.memory for option in flat), default=0.0) or 1.0
    if memory is not None:
        used = {place: option.memory / scale for place, option in enumerate(flat) if option.memory}
        rows.add(used, -np.inf, memory / scale)
    costs = np.array([option.cost for option in flat])
    unit = costs.max() or 1.0
    matrix = csr_array((rows.values, (rows.rows, rows.columns)), shape=(len(rows.low), len(flat)))
    found = milp(
        costs / unit,
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, rows.low, rows.high),  # type: ignore[arg-type]
        options={"time_limit": seconds, "mip_rel_gap": 1e-6},
    )
    if found.x is None:
        return None
    chosen = tuple(
        max(range(len(options)), key=lambda number, first=first: found.x[first + number])
        for first, options in zip(rows.first, problem.options, strict=True)
    )
    taken = [options[number] for options, number in zip(problem.options, chosen, strict=True)]
    gap = float(found.mip_gap) if found.mip_gap is not None else 0.0
    return Choice(chosen, sum(one.cost for one in taken), sum(one.memory for one in taken), gap)


class _Rows:
    """The rows of the constraints."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.first: list[int] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        total = 0
        for options in problem.options:
            self.first.append(total)
            total += len(options)

    def add(self, values: dict[int, float], low: float, high: float) -> None:
        """Adds `low <= sum of values <= high`."""
        self.rows += [len(self.low)] * len(values)
        self.columns += values
        self.values += values.values()
        self.low.append(low)
        self.high.append(high)

    def states(self, edge: Edge) -> list[tuple[int, State]]:
        """Returns the variables of a node's options, each with the state of an output."""
        place, index = edge
        found = [(self.first[place] + n, one.outputs[index]) for n, one in enumerate(self.problem.options[place])]
        return [(column, state) for column, state in found if state is not None]

    def states_in(self, place: int, slot: int) -> list[tuple[int, State]]:
        """Returns the variables of a node's options, each with the state of an input."""
        return [(self.first[place] + n, one.inputs[slot]) for n, one in enumerate(self.problem.options[place])]

    def join(self, offered: Sequence[tuple[int, State]], wanted: Sequence[tuple[int, State]], *, exact: bool) -> None:
        """Adds that states fit together; with `exact`, that they are equal."""
        low = 0.0 if exact else -float("inf")
        forwards = {state.forward for _, state in (*offered, *wanted)}
        for forward in sorted(forwards, key=str):
            some = [(column, state.flags) for column, state in offered if state.forward == forward]
            others = [(column, state.flags) for column, state in wanted if state.forward == forward]
            self._row(others, some, 0.0)
            for place in range(max((len(flags) for _, flags in (*some, *others)), default=0)):
                flagged = [[one for one in each if one[1][place]] for each in (others, some)]
                if flagged[0] or (exact and flagged[1]):
                    self._row(flagged[0], flagged[1], low)

    def _row(self, plus: Sequence[tuple[int, object]], minus: Sequence[tuple[int, object]], low: float) -> None:
        values: dict[int, float] = {}
        for column, _ in plus:
            values[column] = values.get(column, 0.0) + 1.0
        for column, _ in minus:
            values[column] = values.get(column, 0.0) - 1.0
        self.add({column: value for column, value in values.items() if value}, low, 0.0)

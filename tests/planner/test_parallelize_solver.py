"""The integer program of the search, against exhaustive search on random graphs."""

import itertools
import random

import pytest

from weft.planner.parallelize.solve import Option, Problem, State, solve

FORWARDS = ("replicated", "columns")


def fits_together(offered: State | None, wanted: State) -> bool:
    """Whether an input with the state `wanted` can take an output with the state `offered`."""
    if offered is None or offered.forward != wanted.forward:
        return False
    return all(one or not two for one, two in zip(offered.flags, wanted.flags, strict=True))


def random_problem(seed: int) -> Problem:
    """Returns a graph of 3 to 5 nodes with up to two inputs each, some of them with a repeated block."""
    draw = random.Random(seed)
    options, inputs = [], []
    for place in range(draw.randint(3, 5)):
        edges = [(source, 0) for source in draw.sample(range(place), min(place, draw.randint(1, 2)))]
        found = []
        for _ in range(draw.randint(4, 6)):
            taken = tuple(State(draw.choice(FORWARDS), (draw.random() < 0.3,)) for _ in edges)
            given = State(draw.choice(FORWARDS), (draw.random() < 0.6,))
            found.append(Option(taken, (given,), draw.randint(0, 20), draw.randint(0, 5)))
        options.append(found)
        inputs.append(edges)
    equal = [((0, 0), (len(options) - 1, 0))] if draw.random() < 0.3 else []
    return Problem(options, inputs, equal)


def exhaustive(problem: Problem, memory: float | None) -> float | None:
    """Returns the least cost of all choices that fit together; None if none does."""
    best = None
    for choice in itertools.product(*problem.options):
        joined = all(
            fits_together(choice[source].outputs[index], choice[place].inputs[slot])
            for place, edges in enumerate(problem.inputs)
            for slot, (source, index) in enumerate(edges)
        )
        same = all(choice[one[0]].outputs[one[1]] == choice[two[0]].outputs[two[1]] for one, two in problem.equal)
        if joined and same and (memory is None or sum(option.memory for option in choice) <= memory):
            cost = sum(option.cost for option in choice)
            best = cost if best is None else min(best, cost)
    return best


@pytest.mark.parametrize("memory", [None, 9.0])
def test_integer_program_finds_what_exhaustive_search_finds(memory):
    solved = 0
    for seed in range(50):
        problem = random_problem(seed)
        want, got = exhaustive(problem, memory), solve(problem, memory)
        assert (got.cost if got else None) == want, seed
        solved += got is not None
        if got is not None:
            assert got.gap <= 1e-6
            assert memory is None or got.memory <= memory
    assert solved >= 20

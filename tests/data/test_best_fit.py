"""Best fit by counts against best fit one item at a time."""

import numpy as np
import pytest

from weft.data.sequences.best_fit import best_fit_decreasing


def one_by_one(counts, capacity):
    """The free space of all sequences, ascending, after placing every item in turn where it fits best."""
    spaces = []
    for size in range(len(counts) - 1, 0, -1):
        for _ in range(counts[size]):
            fitting = [space for space in spaces if space >= size]
            space = min(fitting, default=capacity)
            if fitting:
                spaces.remove(space)
            spaces.append(space - size)
    return sorted(spaces)


CASES = {
    "random": (np.random.default_rng(0).integers(0, 6, 64), 64),
    "skewed": ((200 / np.arange(1, 51)).astype(int), 50),
    "sparse": (np.random.default_rng(1).integers(0, 40, 97) * (np.random.default_rng(2).random(97) < 0.1), 96),
    "one size": ([0, 0, 0, 1000], 10),
    "halves and a bit": ([0] * 33 + [17, 9] + [0] * 20, 64),
    "as large as a sequence": ([0, 5, 0, 0, 3], 4),
    "nothing": ([7, 0, 0], 5),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_result_of_placing_one_after_the_other(case):
    counts, capacity = CASES[case]
    found = best_fit_decreasing(counts, capacity)
    spaces = []
    for pattern, bins in enumerate(found.bins.tolist()):
        parts = slice(*found.offsets[pattern : pattern + 2])
        spaces += [capacity - int(found.sizes[parts] @ found.repeats[parts])] * bins
        assert (np.diff(found.sizes[parts]) < 0).all()
    assert sorted(spaces) == one_by_one([int(c) for c in counts], capacity)


@pytest.mark.parametrize("case", CASES)
def test_every_item_is_in_one_place(case):
    counts, capacity = CASES[case]
    found = best_fit_decreasing(counts, capacity)
    placed = {size: [] for size in range(1, len(counts))}
    for pattern, bins in enumerate(found.bins.tolist()):
        for part in range(found.offsets[pattern], found.offsets[pattern + 1]):
            first, each = int(found.firsts[part]), int(found.repeats[part])
            placed[int(found.sizes[part])] += range(first, first + bins * each)
    for size, items in placed.items():
        assert sorted(items) == list(range(counts[size]))


def test_a_trillion_items_take_no_longer():
    counts = np.random.default_rng(3).integers(0, 2 * 10**9, 1025)
    counts[0] = 0
    found = best_fit_decreasing(counts, 1024)
    held = found.sizes * found.repeats * np.repeat(found.bins, np.diff(found.offsets))
    tokens = int(counts @ np.arange(1025))
    assert held.sum() == tokens
    assert found.bins.sum() < 1.01 * tokens / 1024  # uniform sizes pack almost perfectly

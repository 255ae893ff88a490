"""Shares of a mixture, worked out without the data: largest remainders, limits, stages."""

from fractions import Fraction

import pytest
from config_cases import load

from weft.data.batches.mixture_plan import plan_mixture
from weft.mixing import (
    BLOCK,
    Stage,
    find_empty_share,
    largest_remainders,
    phases,
    temperature_weights,
)  # fmt: skip


def fractions(*weights):
    return tuple(Fraction(str(weight)) for weight in weights)


@pytest.mark.parametrize(
    ("size", "weights", "counts"),
    [
        (10, (0.7, 0.3), [7, 3]),
        (10, (0.1, 0.2, 0.7), [1, 2, 7]),
        (10, (1, 1, 1), [4, 3, 3]),
        (3, (0.5, 0.25, 0.25), [1, 1, 1]),
        (10_000, (0.33333, 0.66667), [3333, 6667]),
        (0, (1, 2), [0, 0]),
    ],
)
def test_largest_remainders(size, weights, counts):
    assert largest_remainders(size, fractions(*weights)) == counts


def test_without_limits_and_stages_there_is_one_phase_for_ever():
    (only,) = phases([Stage(fractions(0.7, 0.3))], [None, None], 100)
    assert (only.start, only.stop, only.counts, only.before) == (0, None, (70, 30), (0, 0))


def check(found, limits, stages=()):
    """No gap between phases, whole blocks, nobody above the limit, `before` is what was taken before."""
    at, used = 0, [0] * len(limits)
    for phase in found:
        assert phase.start == at
        assert phase.before == tuple(used)
        if phase.stop is None:
            assert phase is found[-1]
            break
        assert (phase.stop - phase.start) % phase.block == 0
        blocks = (phase.stop - phase.start) // phase.block
        used = [taken + blocks * count for taken, count in zip(used, phase.counts, strict=True)]
        at = phase.stop
        assert all(limit is None or taken <= limit for taken, limit in zip(used, limits, strict=True))
    return at, used


def test_a_used_up_source_gives_its_share_away():
    limits = [205, None, None]
    found = phases([Stage(fractions(0.5, 0.3, 0.2))], limits, 100)
    check(found, limits)
    assert [phase.counts for phase in found] == [(50, 30, 20), (5, 3, 2), (0, 60, 40)]
    assert [phase.start for phase in found] == [0, 400, 410]


def test_weights_hold_until_a_small_source_is_used_up():
    first, rest = phases([Stage(fractions(0.7, 0.3))], [None, 9], 10_000)
    assert (first.counts, first.stop) == ((21, 9), 30)
    assert rest.counts == (10_000, 0)


def test_all_limits_reached_is_the_end_and_every_source_was_used_whole():
    limits = [33, 71, 250]
    at, used = check(phases([Stage(fractions(1, 1, 1))], limits, 30), limits)
    assert at == sum(limits)
    assert used == limits


def test_random_mixtures_keep_the_rules():
    import random

    chooser = random.Random(5)
    for _ in range(200):
        n = chooser.randint(1, 6)
        limits = [chooser.choice([None, chooser.randint(0, 5000)]) for _ in range(n)]
        stages = [
            Stage(fractions(*[chooser.choice([0, chooser.random()]) for _ in range(n - 1)], 1), chooser.randint(1, 900))
            for _ in range(3)
        ]
        stages.append(Stage(stages[-1].weights))
        found = phases(stages, limits, chooser.randint(1, 200))
        check(found, limits)
        assert len(found) <= 2 * len(stages) + 3 * n * len(stages)


def test_stages_begin_at_their_sample():
    stages = [Stage(fractions(0.9, 0.1), 250), Stage(fractions(0.5, 0.5), 30), Stage(fractions(0, 1))]
    found = phases(stages, [None, None], 100)
    check(found, [None, None])
    assert [(p.start, p.counts, p.stage) for p in found] == [
        (0, (90, 10), 0), (200, (45, 5), 0), (250, (15, 15), 1), (280, (0, 100), 2),
    ]  # fmt: skip


def test_temperature_is_a_power_of_the_sizes():
    sizes = [1000, 100, 10]
    for temperature in (1.0, 2.0, 5.0):
        weights = [float(w) for w in temperature_weights(sizes, temperature)]
        closed = [size ** (1 / temperature) for size in sizes]
        assert [w / sum(weights) for w in weights] == pytest.approx([c / sum(closed) for c in closed], rel=1e-12)
    assert temperature_weights(sizes, 1.0) == fractions(1, 0.1, 0.01)


def test_a_share_below_one_in_a_block_is_found():
    assert find_empty_share([Stage(fractions(1, 0.0001))], BLOCK) is None
    assert find_empty_share([Stage(fractions(0, 1))], BLOCK) is None
    stage, source, what = find_empty_share([Stage(fractions(1, 1)), Stage(fractions(1, 0.00001))], BLOCK)
    assert (stage, source) == (1, 1)
    assert "10,000 sequences" in what
    assert "data.mixture_block" in what


RUN = """\
model: {preset: llama-tiny, vocab_size: 512}
data:
  train:
  - {store: data/a, weight: 0.75}
  - {store: data/b/, weight: 0.25, max_epochs: 2, name: books}
  sequence_length: 64
training: {steps: 100, batch_tokens: 1024}
"""


def test_a_mixture_from_a_file():
    data = load(RUN).data
    assert [source.label for source in data.train] == ["a", "books"]
    assert data.stages([10, 10], 64) == [Stage(fractions(0.75, 0.25))]
    first, last, rest = data.phases([100_000, 4_000], 64)
    assert (first.counts, first.stop) == ((7500, 2500), 30_000)
    assert last.counts == (1500, 500)
    assert (rest.counts, rest.stop) == ((10_000, 0), None)


def test_the_plan_says_what_a_run_takes_of_each():
    data = load(RUN).data
    told = plan_mixture(data, [1000, 200], 64, 1600)
    assert told.total == (1200, 400)
    assert told.as_dict()["sources"]["books"] == {"share": 0.25, "tokens": 25_600, "epochs": 2.0}
    lines = told.lines()
    assert "75.00%" in lines[1]
    assert "1.2 epochs of 64,000" in lines[1]
    assert "2 epochs of 12,800" in lines[2]
    staged = load(
        RUN.replace(", weight: 0.75", "").replace(", weight: 0.25", ""),
        "data.curriculum=[{tokens: 51200, weights: {a: 1}}, {weights: {a: 1, books: 1}}]",
    ).data
    told = plan_mixture(staged, [1000, 200], 64, 1600)
    assert told.stages == ((0, (800, 0)), (800, (400, 400)))
    assert told.lines()[-1] == "  from token 51,200: a 50.00%, books 50.00%"
    joined = load(RUN.replace(", weight: 0.75", "").replace(", weight: 0.25, max_epochs: 2", "")).data
    told = plan_mixture(joined, [1000, 200], 64, 1200)
    assert told.total == (1000, 200)
    assert told.block is None

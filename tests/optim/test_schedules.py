"""Each schedule against its closed form, through the class that the config names."""

import math

import pytest

from weft.config.components import load_class
from weft.errors import UserError


def factors(name, steps, **arguments):
    schedule = load_class(name, "schedule")(steps, **arguments)
    return [schedule(step) for step in range(steps)]


@pytest.mark.parametrize(
    ("name", "arguments", "closed_form"),
    [
        ("constant", {}, lambda x: 1.0),
        ("linear", {"final": 0.2}, lambda x: 1 - 0.8 * x),
        ("cosine", {"final": 0.1}, lambda x: 0.1 + 0.45 * (1 + math.cos(math.pi * x))),
        ("polynomial", {"power": 3.0}, lambda x: (1 - x) ** 3),
        ("exponential", {"final": 0.01}, lambda x: 0.01**x),
        (
            "step",
            {"every": 30, "factor": 0.5},
            lambda x: 0.5 ** int(x * 90 + 1e-9 >= 30) * 0.5 ** int(x * 90 >= 60 - 1e-9),
        ),
        ("wsd", {"decay_fraction": 0.5}, lambda x: 1.0 if x * 90 < 40 else 1 - (x * 90 - 40) / 50),
        (
            "wsd",
            {"decay_fraction": 0.5, "shape": "sqrt"},
            lambda x: 1.0 if x * 90 < 40 else 1 - math.sqrt((x * 90 - 40) / 50),
        ),
    ],
)
def test_after_the_warm_up_it_is_its_closed_form(name, arguments, closed_form):
    seen = factors(name, 100, warmup_steps=10, **arguments)
    assert seen[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert seen[10:] == pytest.approx([closed_form(i / 90) for i in range(90)], abs=1e-12)


@pytest.mark.parametrize("steps", [2, 3, 6, 7, 30])
def test_a_decay_that_is_asked_for_is_seen_in_the_shortest_run(steps):
    assert factors("wsd", steps)[-1] < 1
    assert factors("wsd", steps, decay_fraction=0.0) == [1.0] * steps


def test_warm_up_as_a_fraction_is_the_same_as_in_steps():
    assert factors("cosine", 200, warmup_fraction=0.05) == factors("cosine", 200, warmup_steps=10)


@pytest.mark.parametrize("arguments", [{"warmup_steps": 3, "warmup_fraction": 0.1}, {"warmup_steps": 11}])
def test_an_impossible_warm_up_is_the_users_mistake(arguments):
    with pytest.raises(UserError, match=r"warm-?up"):
        factors("linear", 10, **arguments)

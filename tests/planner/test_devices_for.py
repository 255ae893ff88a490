"""The smallest number of devices for a number of days, beside a search on every number."""

import pytest
from planner_hardware import ideal
from test_planner_step import run  # noqa: F401 - a fixture

from weft.config.run import RunConfig
from weft.errors import UserError
from weft.planner.devices_for import devices_for
from weft.planner.search import search

LEVELS = [
    {"name": "node", "devices": 2, "latency_us": 1.0, "bandwidth_gb_s": 100.0},
    {"name": "network", "latency_us": 5.0, "bandwidth_gb_s": 10.0},
]


def test_the_smallest_of_all_numbers_is_found(run):  # noqa: F811
    config, hardware = run(1, "training.batch_tokens=8192", "model.num_hidden_layers=2"), ideal(LEVELS, tflops=0.1)
    known = {count: search(config, count, hardware, limit=1) for count in (1, 2, 4, 6, 8)}
    days = {count: plans.best[0].costs()["days"] for count, plans in known.items()}
    for wanted in (2 * days[1], days[2], 1.01 * days[6], 0.999 * days[6]):
        found = devices_for(wanted, config, hardware, lambda config, count, hardware: known[count])
        devices = found.plans.best[0].devices
        assert devices == min(count for count, taken in days.items() if taken <= wanted)
        assert found.tried.items() <= days.items()
        assert found.tried[devices] <= wanted


@pytest.mark.long
def test_a_device_that_is_too_small_is_passed_over(run):  # noqa: F811
    hardware = ideal(LEVELS, tflops=0.1)
    small = hardware.device.model_copy(update={"memory_gb": 1.2})
    host = hardware.host.model_copy(update={"memory_gb": 0.1})
    found = devices_for(
        1000, run(1, "training.batch_tokens=8192"), hardware.model_copy(update={"device": small, "host": host})
    )
    assert found.tried[1] is None
    assert found.plans.best[0].devices > 1


@pytest.mark.parametrize(
    ("days", "message"),
    [
        (1e-9, r"in 1e-09 days; the shortest of those tried is .* days on .* device"),
        (1e-300, r"in 1e-300 days: even at their peak it needs more than 1,048,576"),
    ],
)
def test_no_number_is_enough(run, days, message):  # noqa: F811
    config = run(1, "training.batch_tokens=1024", "model.num_hidden_layers=2")
    with pytest.raises(UserError, match=message):
        devices_for(days, config, ideal(LEVELS, tflops=0.1))


def test_a_run_without_a_length_is_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {vocab_size: 64, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2}\n"
        "data: {sequence_length: 64}\ntraining: {batch_tokens: 1024, epochs: 1}\n"
    )
    config = RunConfig.load(path, check_data=False)
    with pytest.raises(UserError, match=r"length of the run is not known; set training.tokens"):
        devices_for(3, config, ideal())

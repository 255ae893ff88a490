"""The search for plans, beside all candidates of small problems, and its bounds."""

import itertools
import random

import pytest
from planner_hardware import ideal
from test_planner_step import run  # noqa: F401 - a fixture

from weft.config.legal_mesh import is_legal
from weft.errors import UserError
from weft.parallel.stages import balance_layers
from weft.planner.bounds import Bounds
from weft.planner.candidates import MeshSpace
from weft.planner.plan import memory_on, plan_of
from weft.planner.search import search
from weft.planner.step import predict

LINKS = [
    {"name": "inner", "devices": 4, "latency_us": 2, "bandwidth_gb_s": 40},
    {"name": "outer", "latency_us": 10, "bandwidth_gb_s": 5},
]
EXPERTS = ("model.mlp=gated", "model.moe={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 512}")
SMALL = [
    "model.hidden_size=512",
    "model.intermediate_size=2048",
    "model.num_hidden_layers=4",
    "training.dtype=bfloat16",
]


def machine(memory_gb: float):
    hardware = ideal(LINKS, tflops=20, slowdown=0.1)
    device = hardware.device.model_copy(update={"memory_gb": memory_gb, "memory_bandwidth_gb_s": 500.0})
    return hardware.model_copy(update={"device": device})


def candidates(config, devices, hardware):
    """Returns the bounds, all candidates, and a function from a candidate to its config."""
    space = MeshSpace(config, devices, hardware)
    bounds, found = Bounds(space, hardware, cpu=hardware.device.kind == "cpu"), []
    for layout in space.layouts():
        for schedule in space.schedules_of(layout):
            found += space.variants(layout, *schedule)
    return bounds, found, lambda one: space.config_of(one, bounds.stage_layers(one))


@pytest.mark.parametrize(
    ("devices", "memory_gb", "overrides"),
    [
        pytest.param(2, 2.0, SMALL, marks=pytest.mark.long),
        (4, 1.45, [*SMALL, "training.batch_tokens=2048"]),
        (2, 1.7, [*SMALL, *EXPERTS, "training.batch_tokens=2048"]),
    ],
)
def test_the_search_finds_what_all_candidates_give(run, devices, memory_gb, overrides):  # noqa: F811
    config, hardware = run(1, *overrides), machine(memory_gb)
    fastest = {}
    _, every, config_of = candidates(config, devices, hardware)
    for one in every:
        changed = config_of(one)
        if not is_legal(changed, devices):
            continue
        if max(rank.total for rank in memory_on(changed, devices, hardware)) > memory_gb * 1e9:
            continue
        seconds = predict(changed, devices, hardware).step_seconds
        fastest[one.key] = min(seconds, fastest.get(one.key, seconds))
    found = search(config, devices, hardware, limit=3)
    assert found.exact
    assert [plan.prediction.step_seconds for plan in found.best] == pytest.approx(sorted(fastest.values())[:3])
    assert found.predicted < len(fastest) * 20
    for plan in found.best:
        assert plan.excess <= 0
        assert is_legal(plan.config, devices)
        assert plan.prediction.step_seconds == predict(plan.config, devices, hardware).step_seconds
    for plan in found.near:
        assert plan.excess > 0
        assert plan.prediction.step_seconds < found.best[0].prediction.step_seconds


def cpu(memory_gb: float):
    """A machine whose collectives need the cores that compute, and time of the host."""
    hardware = machine(memory_gb)
    device = hardware.device.model_copy(update={"kind": "cpu"})
    host = hardware.host.model_copy(update={"fsdp_us": 300.0, "tp_us": 500.0})
    overlap = hardware.overlap.model_copy(update={"slowdown": 1000.0})
    return hardware.model_copy(update={"device": device, "host": host, "overlap": overlap})


@pytest.mark.parametrize(
    ("overrides", "machine"),
    [
        pytest.param([], machine, marks=pytest.mark.long),
        pytest.param([], cpu, marks=pytest.mark.long),
        (EXPERTS, machine),
        pytest.param(["training.compile=true", "optimizer={type: muon, lr: 0.01}"], machine, marks=pytest.mark.long),
        pytest.param(["parallel.layers_per_fsdp_unit=2"], cpu, marks=pytest.mark.long),
    ],
)
def test_bounds_never_exceed_what_is_predicted(run, overrides, machine):  # noqa: F811
    hardware = machine(8.0)
    bounds, every, config_of = candidates(run(1, *overrides), 16, hardware)
    checked = 0
    for one in random.Random(0).sample(every, 20):
        config = config_of(one)
        if not is_legal(config, 16):
            continue
        seconds = predict(config, 16, hardware).step_seconds * (1 + 1e-9)
        assert bounds.layout_seconds(one.layout) <= seconds
        assert bounds.seconds(one) <= seconds
        assert one.layout.pp == 1 or bounds.tight_seconds(one) <= seconds
        assert bounds.memory(one) <= max(rank.total for rank in memory_on(config, 16, hardware)) * (1 + 1e-9)
        checked += 1
    assert checked > 12


def test_the_batch_and_the_optimizer_stay(run):  # noqa: F811
    config = run(2, "parallel={dp_replicate: 2, compress: {rank: 2, start_step: 1}}", "training.grad_clip=0.5")
    plan = search(config, 8, machine(20.0), limit=1).best[0]
    assert plan.config.training.batch_tokens == config.training.batch_tokens
    assert plan.config.training.grad_clip == 0.5
    assert plan.config.parallel.compress == config.parallel.compress
    assert plan.parallel["dp_replicate"] > 1  # compression needs replicas


def test_layers_are_split_so_that_the_slowest_stage_is_fastest():
    chooser = random.Random(0)
    for _ in range(60):
        costs = [chooser.choice([1, 2, 5]) for _ in range(chooser.randint(2, 7))]
        stages, first, last = chooser.randint(2, len(costs)), chooser.randint(0, 6), chooser.randint(0, 6)

        def slowest(counts, costs=costs, first=first, last=last):
            ends = list(itertools.accumulate(counts))
            sums = [sum(costs[end - size : end]) for end, size in zip(ends, counts, strict=True)]
            return max([sums[0] + first, *sums[1:-1], sums[-1] + last])

        every = (one for one in itertools.product(range(1, 8), repeat=stages) if sum(one) == len(costs))
        found = balance_layers(costs, stages, last, first)
        assert sum(found) == len(costs)
        assert slowest(found) == min(map(slowest, every))


def test_uneven_layers_and_a_large_head_have_uneven_stages(run):  # noqa: F811
    config = run(1, "model.vocab_size=65536", "parallel={}", "training.batch_tokens=65536")
    space = MeshSpace(config, 4, machine(100.0))
    layout = next(one for one in space.layouts() if one.pp == 4)
    candidate = next(space.variants(layout, "1f1b", 1))
    layers = Bounds(space, machine(100.0)).stage_layers(candidate)
    assert layers is not None
    assert sum(layers) == 8
    assert layers[-1] == 1  # the head costs as much as several layers


def test_without_room_the_error_names_the_nearest_plan_and_remedies(run):  # noqa: F811
    with pytest.raises(UserError) as error:
        search(run(), 2, machine(1.15))
    message = str(error.value)
    assert "no plan fits 2 devices of 1.15 GB" in message
    assert "too much" in message
    assert all(f"({number})" in message for number in range(1, 6))


def test_more_devices_than_the_batch_allows(run):  # noqa: F811
    config = run(1, "training.batch_tokens=1024")
    with pytest.raises(
        UserError, match=r"1,048,576 devices: no mesh.*2 sequences \(training.batch_tokens\).*8 layers"
    ) as error:
        search(config, 1 << 20, machine(20.0))
    most = int(str(error.value).partition("use at most ")[2].partition(" device")[0].replace(",", ""))
    assert search(config, most, machine(20.0), limit=1).best


def test_the_second_plan_loses_by_named_parts(run):  # noqa: F811
    found = search(run(), 8, machine(20.0), limit=2)
    first, second = (plan.prediction for plan in found.best)
    assert first.step_seconds <= second.step_seconds
    assert found.reason is not None
    assert plan_of(found.best[0].config, 8, machine(20.0)).as_dict()["parts"] == first.parts

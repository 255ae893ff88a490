"""Plans that the search finds for modules with other architectures, carried out on two ranks: equal to one process."""

import parallelize_counts
import parallelize_parts
import pytest
import torch
import zoo_parts
from modules_to_parallelize import inputs_of, make
from parallelize_counts import slow_device
from zoo_to_parallelize import ZOO

from weft.planner.parallelize.search import search_plan

pytestmark = pytest.mark.xdist_group("ranks")


def tables(name: str) -> dict:
    """The plan for two devices and one row of inputs, which only the tensor axis can share."""
    torch.set_default_dtype(torch.float64)
    try:
        args, kwargs = inputs_of(name, 1)
        example = {"image": args[0], **kwargs} if name == "clip" else (*args, *kwargs.values())
        plan, _, _ = search_plan(make(name), example, devices=2, hardware=slow_device("float64"))
    finally:
        torch.set_default_dtype(torch.float32)
    fields = ("dp", "tp", "parameters", "inputs", "outputs", "islands", "structure")
    return {field: getattr(plan, field) for field in fields}


def test_found_plans_are_one_process(ranks):
    cases = [(name, tables(name)) for name in ("gpt", "vit", "clip", "experts")]
    assert all(found["tp"] == 2 and (found["parameters"] or found["islands"]) for _, found in cases)
    for found in ranks.call(parallelize_parts.equal_to_one_process, 2, cases, seconds=240):
        for name, worst in found:
            assert worst < 1e-9, f"{name}: {worst}"


def test_predicted_collectives_are_those_that_ranks_have(ranks):
    for predicted, counted in ranks.call(parallelize_counts.predicted_and_counted, 2, seconds=240):
        assert predicted == counted
        assert counted["reduce-scatter"] > 3  # sequence parallelism, in each layer


@pytest.mark.matrix
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("name", list(ZOO))
def test_found_plans_of_the_zoo_are_one_process(ranks, name, devices):
    rows = max(1, devices // 2)  # fewer than devices, so that all plans have a tensor axis
    plans = zoo_parts.found_plans(name, devices, rows)
    for found in ranks.call(zoo_parts.equal_to_one_process, devices, name, rows, plans, seconds=900):
        assert max(found) < 1e-9, dict(zip([(p["dp"], p["tp"], p["recompute"]) for p in plans], found, strict=True))

"""Plans that the search finds for modules with other architectures, carried out on two ranks: equal to one process."""

from dataclasses import replace
from pathlib import Path

import parallelize_counts
import parallelize_parts
import pytest
import torch
import zoo_parts
import zoo_to_parallelize
from modules_to_parallelize import inputs_of, make
from parallelize_counts import slow_device
from torch.distributed.tensor import Replicate, Shard
from zoo_to_parallelize import ZOO

from weft.planner.parallelize.explain import difference
from weft.planner.parallelize.picture import picture
from weft.planner.parallelize.plan import Plan
from weft.planner.parallelize.read import read_plan
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


@pytest.mark.parametrize("names", [["clip", "experts"], pytest.param(["gpt", "vit"], marks=pytest.mark.long)], ids=str)
def test_found_plans_are_one_process(ranks, names):
    cases = [(name, tables(name)) for name in names]
    assert all(found["tp"] == 2 and (found["parameters"] or found["islands"]) for _, found in cases)
    for found in ranks.call(parallelize_parts.equal_to_one_process, 2, cases, seconds=240):
        for name, worst in found:
            assert worst < 1e-9, f"{name}: {worst}"


def test_predicted_collectives_are_those_that_ranks_have(ranks):
    plan, predicted = parallelize_counts.predicted()
    for counted in ranks.call(parallelize_counts.counted, 2, plan, seconds=240):
        assert predicted == counted
        assert counted["reduce-scatter"] > 3  # sequence parallelism, in each layer


def with_few_heads(devices: int, rows: int, path: Path) -> Plan:
    """The plan of a Llama whose two heads more devices cannot share, as a file has it."""
    example = zoo_to_parallelize.inputs_of("few-heads", rows)
    model, hardware = zoo_to_parallelize.make("few-heads"), slow_device("float64")
    plan, search, best = search_plan(model, example, devices=devices, hardware=hardware)
    path.with_suffix(".svg").write_text(picture(search, best))
    assert plan.prediction["step_seconds"] < 0.98 * min(one.choice.cost for one in search.found)
    plan.write(path)
    assert read_plan(path) == read_plan(path.with_suffix(".json")) == plan
    return plan


def check_few_heads(ranks, devices: int, rows: int, plan: Plan) -> None:
    tables = {field: getattr(plan, field) for field in zoo_parts.TABLES}
    for found in ranks.call(zoo_parts.equal_to_one_process, devices, "few-heads", rows, [tables], seconds=600):
        assert max(found) < 1e-9, found


@pytest.mark.long
def test_heads_that_do_not_divide_get_a_second_tensor_axis(ranks, tmp_path):
    plan = with_few_heads(4, 1, tmp_path / "plan.py")
    assert (plan.dp, plan.tp, plan.tp2) == (1, 2, 2)
    assert str(plan) == "dp 1 x tp 2 x tp2 2"
    split = {name.rpartition("layers.*.")[2]: placed for name, placed in plan.parameters.items()}
    assert split["q.weight"] == (Shard(0), Replicate())  # one axis splits the heads, and the other the sequence
    assert split["up.weight"] == (Shard(0), Shard(0))  # both split the MLP
    drawn = (tmp_path / "plan.svg").read_text()
    assert "<title>dp 1 x tp 2 x tp2 2</title>" in drawn
    assert "Shard(0), Replicate()" in drawn
    changed = difference(plan, replace(plan, parameters={}))
    assert any("q.weight: Shard(0), Replicate() -> none" in line for line in changed)
    check_few_heads(ranks, 4, 1, plan)


@pytest.mark.matrix
def test_two_tensor_axes_on_eight_ranks_are_one_process(ranks, tmp_path):
    plan = with_few_heads(8, 1, tmp_path / "plan.py")
    assert plan.tp * plan.tp2 == 8
    check_few_heads(ranks, 8, 1, plan)
    check_few_heads(ranks, 8, 2, replace(with_few_heads(4, 1, tmp_path / "four.py"), dp=2))


@pytest.mark.matrix
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("name", list(ZOO))
def test_found_plans_of_the_zoo_are_one_process(ranks, name, devices):
    rows = max(1, devices // 2)  # fewer than devices, so that all plans have a tensor axis
    plans = zoo_parts.found_plans(name, devices, rows)
    for found in ranks.call(zoo_parts.equal_to_one_process, devices, name, rows, plans, seconds=900):
        assert max(found) < 1e-9, dict(zip([(p["dp"], p["tp"], p["recompute"]) for p in plans], found, strict=True))

"""Models that train by plans, over many steps and at long sequences: the losses are those of one device."""

import long_llama
import pytest
import stage_parts
import torch
import training_curves
from test_parallelize import COLUMNS_AND_ROWS
from torch.distributed.tensor import Shard

import weft

pytestmark = pytest.mark.xdist_group("ranks")

SEQUENCE = {"tp": 2, "parameters": COLUMNS_AND_ROWS, "inputs": {"h.*": Shard(1)}}
HEADS = {
    "layers.*.[qkv].weight": Shard(0),
    "layers.*.o.weight": Shard(1),
    "head.weight": Shard(0),
    "embedding.weight": Shard(0),
}
TWO, FOUR = stage_parts.TWO["gpt"], stage_parts.FOUR["gpt"]


def found_plan(devices: int) -> dict:
    """The plan that the search finds for more devices than rows, so that it has a tensor axis."""
    ids = torch.zeros(devices // 2, training_curves.LENGTH, dtype=torch.int64, device="meta")
    plan = weft.parallelize(training_curves.make, (ids, ids), devices=devices, loss=training_curves.loss_of)
    assert plan.tp > 1
    return {name: getattr(plan, name) for name in ("dp", "tp", "parameters", "inputs", "outputs", "recompute")}


def check(ranks, number, plans, steps):
    for alone, *planned in ranks.call(training_curves.curves, number, plans, steps, seconds=900):
        assert sum(alone[-3:]) < sum(alone[:3]) * (0.8 if steps > 50 else 0.98)  # it learns
        for plan, losses in zip(plans, planned, strict=True):
            worst = max(abs(one - other) for one, other in zip(alone, losses, strict=True))
            assert worst < 1e-9, f"{plan}: {worst}"


@pytest.mark.long
def test_a_gpt_learns_as_on_one_device(ranks):
    check(ranks, 2, [SEQUENCE | {"recompute": ("h.*",)}], 8)


@pytest.mark.matrix
def test_the_curve_of_a_gpt_by_plans_for_two_devices_is_that_of_one_device(ranks):
    stages = {"pp": 2, "stages": TWO, "micro_batches": 4}
    check(ranks, 2, [{"dp": 2}, SEQUENCE, stages, found_plan(2)], 60)


@pytest.mark.matrix
def test_the_curve_of_a_gpt_by_plans_for_four_devices_is_that_of_one_device(ranks):
    both = {"dp": 2, "tp": 2, "parameters": COLUMNS_AND_ROWS}
    rows = {"pp": 2, "dp": 2, "stages": TWO, "micro_batches": 2, "schedule": "GPipe"}
    zero_bubble = {"pp": 2, "stages": FOUR, "micro_batches": 4, "schedule": "ZBVZeroBubble"}
    tensors = zero_bubble | {"tp": 2, "parameters": COLUMNS_AND_ROWS}
    four = {"pp": 4, "stages": FOUR, "micro_batches": 8}
    check(ranks, 4, [both, rows, tensors, four, found_plan(4)], 60)


@pytest.mark.matrix
@pytest.mark.parametrize(("devices", "rows"), [(2, 1), (2, 2), (4, 2)])
def test_a_llama_with_chunks_of_logits_at_8192_tokens_is_one_device(ranks, devices, rows):
    plans = [long_llama.found_plan(devices, rows)]
    if rows == 1:
        plans.append({"tp": devices, "parameters": HEADS})
    for found in ranks.call(long_llama.equal_to_one_process, devices, rows, plans, seconds=900):
        for plan, (worst, chunks) in zip(plans, found, strict=True):
            assert worst < 1e-9, f"{plan}: {worst}"
            assert chunks <= 9, f"{plan}: a rank has {chunks} of {long_llama.LENGTH // long_llama.CHUNK} chunks"

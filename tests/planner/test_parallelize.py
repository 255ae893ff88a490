"""Plans of `weft.parallelize`, carried out on several ranks: all values are those of one process."""

import json

import parallelize_parts
import pytest
import torch
from modules_to_parallelize import inputs_of, make
from torch import nn
from torch.distributed.tensor import Shard
from transformers_to_parallelize import CASES, FLOAT32

import weft
from weft.errors import UserError
from weft.planner.parallelize.dry_run import dry_run
from weft.planner.parallelize.plan import Plan

pytestmark = pytest.mark.xdist_group("ranks")

COLUMNS_AND_ROWS = {
    "h.*.attn.c_attn.*": Shard(0),
    "h.*.attn.c_proj.weight": Shard(1),
    "h.*.fc.*": Shard(0),
    "h.*.proj.weight": Shard(1),
    "wte.weight": Shard(0),
}


TP = {"tp": 2, "parameters": COLUMNS_AND_ROWS, "recompute": ("h.*",), "inputs": {"h.*": Shard(1)}}


def check(ranks, number, cases, steps=2):
    for found in ranks.call(parallelize_parts.equal_to_one_process, number, cases, steps, seconds=240):
        for name, worst in found:
            assert worst < 1e-9, f"{name}: {worst}"


@pytest.mark.parametrize("more", [False, True], ids=["some", "more"])
@pytest.mark.long
def test_sharded_data_and_sharded_layers_are_one_process(ranks, more):
    dp, kept = {"dp": 2}, {"dp": 2, "reshard_after_forward": False}
    rows = {"dp": 2, "islands": {"": "rows"}}
    channels = {"tp": 2, "parameters": {"a.*": Shard(0), "up.*": Shard(0)}}
    check(ranks, 2, [("unet", dp), ("experts", rows), ("gpt", TP), ("gpt", kept | {"recompute": ("h.*",)})])
    if more:
        check(ranks, 2, [("gpt", dp), ("vit", dp), ("unet", channels), ("gpt", kept)])


def test_losses_of_sharded_rows_are_one_process(ranks):
    for found in ranks.call(parallelize_parts.losses, 2, seconds=240):
        assert len(found) == 9
        for name, worst in found.items():
            assert worst < 1e-12, f"{name}: {worst}"


def test_parameters_that_are_kept_are_gathered_once():
    (ids,), kwargs = inputs_of("gpt")
    kept, again = (
        dry_run(Plan(dp=2, reshard_after_forward=reshard), make("gpt"), (ids,), kwargs).counts["all_gather_into_tensor"]
        for reshard in (False, True)
    )
    used = {id(parameter) for parameter in make("gpt").parameters()}  # once in forward
    assert len(used) <= kept < again <= 2 * kept


def test_two_axes_are_one_process(ranks):
    check(ranks, 4, [("block", {"dp": 2, "tp": 2, "parameters": COLUMNS_AND_ROWS})], steps=1)


def test_what_apply_promises(ranks):
    for found in ranks.call(parallelize_parts.contract, 2, {"dp": 2}, seconds=240):
        for name, worst in found.items():
            assert worst < 1e-9, f"{name}: {worst}"


def test_one_device_needs_no_torchrun(ranks):
    ((found,),) = ranks.call(parallelize_parts.equal_to_one_process, 1, [("clip", {})])
    assert found[1] < 1e-12


def test_functions_without_rules_run_on_full_tensors(ranks):
    for functions, worst in ranks.call(parallelize_parts.without_rules, 2, {"dp": 2}):
        assert {"where", "__getitem__"} <= set(functions)
        assert worst < 1e-9


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_models_of_transformers_are_one_process(ranks, mesh):
    dp, tp = mesh
    for found in ranks.call(parallelize_parts.transformers_models, dp * tp, list(CASES), dp, tp, seconds=900):
        for name, worst in found.items():
            assert worst < (1e-4 if name in FLOAT32 else 1e-9), f"{name}: {worst}"


@pytest.fixture
def module():
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


def test_plans_are_the_same_after_json(module):
    plan = weft.parallelize(module, torch.zeros(3, 4), devices=2)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(parameters={"head.weight": Shard(0)}), ["parameters", "'head.weight'", "Sequential"]),
        (Plan(inputs={"1.*": Shard(0)}), ["inputs", "'1.*'"]),
        (Plan(structure="0123"), ["0123", "weft.parallelize again"]),
        (Plan(dp=3), ["3 devices", "1 process", "torchrun --nproc-per-node 3"]),
    ],
)
def test_plans_that_do_not_fit_are_refused(module, plan, words):
    with pytest.raises(UserError) as error:
        plan.apply(module)
    assert all(word in str(error.value) for word in words)


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            largest = self.layer(x).abs().amax()
        return self.layer(x) / largest


def test_planning_leaves_gradients_and_autocast_as_they_are():
    with torch.enable_grad():
        weft.parallelize(Normalized(), torch.zeros(2, 4), devices=2)
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")


def test_what_cannot_be_planned_is_refused(module):
    with pytest.raises(UserError, match="example_inputs has no tensor"):
        weft.parallelize(module, (), devices=2)
    with pytest.raises(UserError, match=r"Sequential does not run.*\(1: \[2, 5\]\).*runs on one device"):
        weft.parallelize(module, torch.zeros(2, 5), devices=2)
    with pytest.raises(UserError, match="3 is no module"):
        weft.parallelize(3, torch.zeros(2, 4), devices=2)
    with pytest.raises(UserError, match="devices='2'"):
        weft.parallelize(module, torch.zeros(2, 4), devices="2")
    with pytest.raises(UserError, match="devices=0"):
        weft.parallelize(module, torch.zeros(2, 4), devices=0)
    with pytest.raises(UserError, match=r"inputs='rows'.*\"global\" or \"local\""):
        Plan().apply(module, inputs="rows")

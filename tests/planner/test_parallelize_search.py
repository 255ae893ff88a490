"""Plans that the search finds, against what is known to be best."""

import pytest
import torch
from llama_on_meta import MLP, PerToken, example, make
from parallelize_counts import slow_device
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from weft.errors import UserError
from weft.planner.hardware import load_hardware
from weft.planner.parallelize.graph import Meta, Node, Ref
from weft.planner.parallelize.runtime import match
from weft.planner.parallelize.search import meshes, search_plan, solve_setting
from weft.planner.parallelize.strategies import Trials
from weft.planner.parallelize.tables import Found, Search, make_plan


@pytest.fixture(scope="module")
def llama():
    """A Llama with 2 rows on 8 devices with fast links: the plan, the search, and what it chose."""
    return search_plan(make, example, devices=8, hardware="h100-sxm")


def best_with(search, tp: int, recompute: bool = False, reshard: bool = True) -> Found:
    wanted = tp, recompute, reshard
    found = [(one.setting.tp, one.setting.recompute, one.setting.reshard) for one in search.found]
    return search.found[found.index(wanted)]


def test_llama_gets_columns_rows_and_sequence_parallelism(llama):
    plan, _, _ = llama
    parameters = {pattern: placement.dim for pattern, placement in plan.parameters.items()}
    columns = [
        f"layers.*.{name}.weight" for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    ]
    rows = ["layers.*.attention.o.weight", "layers.*.mlp.down.weight"]
    assert [parameters[name] for name in columns] == [0] * 5  # q, k and v look alike
    assert [parameters[name] for name in rows] == [1, 1]
    assert not [name for name in parameters if "norm" in name]
    moves = [*plan.inputs.items(), *plan.outputs.items()]
    between = [placement for name, placement in moves if name.startswith("layers.*")]
    assert Shard(1) in between  # the sequence, between column and row
    assert Replicate() in between
    assert plan.prediction["optimality_gap"] <= 0.02


def test_layers_count_as_often_as_they_run(llama):
    _, search, _ = llama
    times = {step.node.name: step.node.times for step in search.space.steps if step.kind == "parameter"}
    assert times["layers.0.mlp.up.weight"] == 4
    assert times["head.weight"] == 1
    assert not [name for name in times if name.startswith("layers.1")]
    step = next(step for step in search.space.steps if step.node.name == "linear_3")  # attention.o
    assert step.full_forward.flops == 2 * (2 * 4096) * 4096 * 4096
    assert step.full_backward.flops == 2 * step.full_forward.flops


def test_predicted_states_are_those_of_adam(llama):
    plan, _, _ = llama
    states = 0.0
    for name, parameter in make().named_parameters():
        sharded = match(name, plan.parameters) is not None
        states += parameter.numel() * 2 * 4 / plan.dp / (plan.tp if sharded else 1)  # bfloat16; gradient, two moments
    assert plan.prediction["state_bytes"] == pytest.approx(states)


def test_the_large_vocabulary_is_split(llama):
    assert llama[0].parameters["head.weight"] in (Shard(0), Shard(1))


def test_small_memory_brings_recomputation(llama):
    _, search, best = llama
    assert not best.setting.recompute
    every = Search(search.space)
    for setting in meshes(search.space.graph, 8):
        solve_setting(every, load_hardware("h100-sxm"), setting, 80e9, 10.0)
    without, with_it = best_with(every, 4), best_with(every, 4, recompute=True)
    assert with_it.choice.memory < without.choice.memory
    assert with_it.choice.cost > without.choice.cost
    kept = best_with(every, 4, reshard=False)
    assert kept.choice.memory > without.choice.memory
    assert kept.choice.cost < without.choice.cost
    assert [one.setting.recompute or one.setting.reshard for one in search.found].count(True) == 1  # that with dp 1
    least = min(one.choice.memory for one in every.found if not one.setting.recompute)
    again = Search(search.space)
    for setting in meshes(search.space.graph, 8):
        solve_setting(again, load_hardware("h100-sxm"), setting, 0.6 * least, 10.0)
    chosen = min(again.found, key=lambda one: one.choice.cost)
    assert chosen.setting.recompute
    assert chosen.choice.memory <= 0.6 * least
    assert make_plan(make(), again, chosen, load_hardware("h100-sxm")).recompute == ("layers.*",)


def test_memory_that_cannot_suffice_is_refused():
    with pytest.raises(UserError, match=r"does not fit 2 devices with 1 MB of memory.*needs at least"):
        search_plan(PerToken, torch.empty(2, 64, 512), devices=2, hardware="h100-sxm", memory="1MB")


def test_long_sequences_are_split():
    plan, _, _ = search_plan(PerToken, torch.empty(1, 1 << 16, 512), devices=4, hardware="h100-sxm")
    assert (plan.dp, plan.tp) == (1, 4)
    assert plan.parameters == {}
    assert Shard(1) in plan.inputs.values()


@pytest.mark.parametrize(
    ("rows", "devices", "message"),
    [(3, 256, r"3 rows.*256 devices.*192 devices"), (2, 0, "devices=0"), (2, -1, "1 or more")],
)
def test_rows_and_devices_that_do_not_fit_are_refused(rows, devices, message):
    with pytest.raises(UserError, match=message):
        search_plan(PerToken, torch.empty(rows, 64, 512), devices=devices)


def test_what_dtensor_computes_to_find_a_rule_is_no_work():
    """The backward pass of a group norm is one operator, which DTensor decomposes to propagate placements."""
    metas = [Meta(shape, torch.float64) for shape in ((1, 8, 4, 4), (8,), (8,))]
    norm = Node("norm", "op", torch.ops.aten.group_norm.default, (Ref(0), 2, Ref(1), Ref(2)), outputs=(metas[0],))
    trials, replicated = Trials(), (Replicate(),)
    trial = trials.forward("norm", norm, [(meta, True) for meta in metas], (replicated,) * 3)
    assert trial is not None
    found = trials.backward(("norm",), trial, ((False,),))
    assert found is not None
    assert found[1].calls == 1


class MadeConstants(nn.Module):
    """Makes a tensor on the device of its input, and calls parts of repeated blocks."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": MLP(16, 32), "down": MLP(16, 32)}) for _ in range(2))

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device).to(x)
        for layer in self.layers:
            x = layer["down"](layer["up"](x * places[:, None]))
        return torch.stack(torch.unbind(x, 1)[::2]).cummax(0).values  # an operator without a sharding rule


def test_constants_and_parts_of_blocks_are_planned():
    plan, search, _ = search_plan(MadeConstants(), torch.zeros(1, 8, 16), devices=2, hardware=slow_device("float32"))
    assert plan.parameters
    assert {name.rpartition(".layers")[0] for name in plan.parameters} == {""}
    assert [str(step.node.target) for step in search.space.unsupported] == ["aten.cummax.default"]
    line = next(line for line in plan.explain().splitlines() if line.startswith("  cummax: "))
    assert "test_parallelize_search.py:" in line  # the source
    assert "ms on every rank" in line

"""Plans that the search finds for the zoo, and what ranks do to compare them with one process."""

import copy

import torch
import zoo_to_parallelize as zoo
from parallelize_counts import slow_device
from parallelize_parts import difference, loss_of, shapes_of

from weft.planner.parallelize.plan import Plan
from weft.planner.parallelize.search import memory_bytes, meshes, search_plan, solve_setting
from weft.planner.parallelize.tables import Search, make_plan

TABLES = ("dp", "tp", "tp2", "parameters", "inputs", "outputs", "islands", "recompute", "structure")
TABLES += ("reshard_after_forward",)


def found_plans(name: str, devices: int, rows: int) -> list[dict]:
    """The tables of the three fastest plans, of different meshes or recomputation."""
    torch.set_default_dtype(torch.float64)
    try:
        model, hardware = zoo.make(name), slow_device("float64")
        _, search, _ = search_plan(model, zoo.inputs_of(name, rows), devices=devices, hardware=hardware)
        every = Search(search.space)  # also plans that need less memory
        for setting in meshes(search.space.graph, devices):
            solve_setting(every, hardware, setting, memory_bytes(None, hardware), 10.0)
        assert all(one.choice.gap <= 0.02 for one in every.found)
        order = sorted(every.found, key=lambda one: one.choice.cost)
        best = list({(one.setting.tp, one.setting.recompute): one for one in reversed(order)}.values())[-3:]
        plans = [make_plan(model, search, one, hardware) for one in best]
    finally:
        torch.set_default_dtype(torch.float32)
    return [{field: getattr(plan, field) for field in TABLES} for plan in plans]


def equal_to_one_process(name: str, rows: int, plans: list[dict]) -> list[float]:
    """For each plan: the largest difference of loss, gradients and parameters after a step, by the largest gradient."""
    torch.set_default_dtype(torch.float64)
    found = []
    for tables in plans:
        reference = zoo.make(name)
        module = Plan(**tables).apply(copy.deepcopy(reference))
        outs = []
        for one in (reference, module):
            torch.manual_seed(2)
            outs.append(one(*zoo.inputs_of(name, rows)))
            loss_of(outs[-1]).backward()
        assert shapes_of(outs[0]) == shapes_of(outs[1]), name
        losses = [loss_of(out).item() for out in outs]
        largest = max(p.grad.abs().max().item() for p in reference.parameters() if p.grad is not None)
        worst = [abs(losses[0] - losses[1]) / abs(losses[0]), difference(reference, module) / max(largest, 1.0)]
        for one in (reference, module):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
        pairs = zip(reference.parameters(), module.parameters(), strict=True)
        worst += [(one - other.full_tensor()).abs().max().item() / max(largest, 1.0) for one, other in pairs]
        found.append(max(worst))
    return found

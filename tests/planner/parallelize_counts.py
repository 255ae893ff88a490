"""What ranks do in a test of predictions: apply a plan, and count collectives."""

from collections import Counter

import torch
from llama_on_meta import Llama
from torch.distributed.tensor.debug import CommDebugMode

from weft.planner.hardware import load_hardware
from weft.planner.parallelize.plan import Plan
from weft.planner.parallelize.search import search_plan
from weft.planner.parallelize.tables import collective

NAMES = {
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
}


def slow_device(dtype: str):
    """Hardware on which any sharding pays, also of tiny modules."""
    found = load_hardware("h100-sxm")
    peaks = found.device.peak_tflops.model_copy(update={dtype: 1e-6})
    device = found.device.model_copy(update={"peak_tflops": peaks, "memory_bandwidth_gb_s": 1e-3})
    return found.model_copy(update={"device": device})


def small_llama() -> tuple[torch.nn.Module, torch.Tensor]:
    """A small Llama and its tokens."""
    torch.manual_seed(0)
    return Llama(vocab=64, hidden=32, heads=4, inner=64, layers=3), torch.randint(0, 64, (1, 8))


def predicted() -> tuple[Plan, dict[str, int]]:
    """The plan for two devices, and collectives of a training step as the search predicts them."""
    model, tokens = small_llama()
    plan, search, best = search_plan(model, tokens, devices=2, hardware=slow_device("float32"))
    found: Counter[str] = Counter()
    for place, (step, strategy) in enumerate(zip(search.space.steps, best.strategies, strict=True)):
        for move in (*strategy.forward.moves, *strategy.backward.moves):
            if best.prices.move(move, best.prices.rows[place]):
                found[collective(move.source[0], move.target[0])] += step.node.times
        if step.kind == "parameter" and strategy.outputs[0].partial[0]:
            found["all-reduce"] += step.node.times
    return plan, dict(found)


def counted(plan: Plan) -> dict[str, int]:
    """Collectives of a training step, as a rank has them."""
    model, tokens = small_llama()
    plan.apply(model)
    model(tokens).backward()
    with CommDebugMode() as calls:
        model(tokens).backward()
    found = {str(name).rpartition(".")[2]: count for name, count in calls.get_comm_counts().items()}
    return {NAMES[name]: count for name, count in found.items()}

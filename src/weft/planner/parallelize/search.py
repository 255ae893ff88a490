"""Finds the fastest plan for a module on a number of devices."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.errors import UserError
from weft.formatting import byte_size
from weft.planner.hardware import Hardware, hardware_of, load_hardware
from weft.planner.parallelize.capture import capture
from weft.planner.parallelize.graph import Graph
from weft.planner.parallelize.plan import Plan
from weft.planner.parallelize.pricing import DTYPES, Prices, Setting
from weft.planner.parallelize.solve import Problem, solve
from weft.planner.parallelize.space import Space
from weft.planner.parallelize.strategies import TRIED, Trials
from weft.planner.parallelize.tables import Found, Search, make_plan
from weft.planner.plan import capacity

GENERIC = "h100-sxm"  # the hardware file where neither a file is named nor a GPU is found
USABLE = 0.9  # fraction of a device's memory for parameters, gradients, moments and activations
WIDEST_TP = 64  # ranks of the tensor axis at most


def search_plan(
    module: nn.Module | Callable[[], nn.Module],
    example_inputs: Any,
    *,
    devices: int,
    hardware: str | Hardware | None = None,
    memory: str | float | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    seconds: float = 60.0,
) -> tuple[Plan, Search, Found]:
    """Returns the fastest plan for a module, and how it was found; for the arguments see `weft.parallelize`.

    Args:
        seconds: time limit of the solver for all meshes together.
    """
    if not isinstance(devices, int) or devices < 1:
        raise UserError(f"devices={devices!r} is not supported; give the number of devices, 1 or more")
    start = time.perf_counter()
    machine = hardware if isinstance(hardware, Hardware) else load_hardware(hardware or this_machine())
    model = module if isinstance(module, nn.Module) else _built(module)
    graph = capture(model, example_inputs, loss)
    captured = time.perf_counter()
    settings = meshes(graph, devices)
    search = Search(Space(graph, Trials()))
    search.seconds.update(capture=captured - start, trials=time.perf_counter() - captured)
    limit = memory_bytes(memory, machine)
    for setting in settings:
        solve_setting(search, machine, setting, limit, seconds / len(settings))
    if not search.found:
        raise UserError(_too_large(type(model).__name__, search, devices, limit))
    search.seconds["solver"] = time.perf_counter() - start - sum(search.seconds.values())
    best = min(search.found, key=lambda one: one.choice.cost)
    return make_plan(model, search, best, machine), search, best


def _built(factory: Callable[[], nn.Module]) -> nn.Module:
    if not callable(factory):
        raise UserError(f"{factory!r} is no module; give a torch.nn.Module, or a function that returns one")
    with torch.device("meta"):
        model = factory()
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{factory} returned a {type(model).__name__}; give a torch.nn.Module, or a function that returns one"
        )
    return model


def _too_large(name: str, search: Search, devices: int, limit: float) -> str:
    if not search.needed:
        return f"no plan runs {name} on {devices} devices"
    setting, least = min(search.needed.items(), key=lambda item: item[1])
    return (
        f"{name} does not fit {devices} devices with {byte_size(limit)} of memory each: dp {setting.dp} x tp "
        f"{setting.tp} needs at least {byte_size(least)}; give more devices or memory, or fewer rows"
    )


def this_machine() -> str:
    """Returns the name of the hardware file for this machine's GPU; without a GPU, that of a generic device."""
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 1e9
        return hardware_of(torch.cuda.get_device_name(), memory) or GENERIC
    return GENERIC


def memory_bytes(memory: str | float | None, hardware: Hardware) -> float:
    """Returns the bytes that a plan may use on a device.

    Args:
        memory: a number of bytes, or a text such as `70GB` or `70GiB`. Default: 90% of the device's memory.

    Raises:
        UserError: the text is not a size.
    """
    if memory is None:
        return capacity(hardware) * USABLE
    if isinstance(memory, int | float):
        return float(memory)
    text = memory.strip()
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("GB", 1e9), ("MB", 1e6), ("TB", 1e12), ("B", 1.0)):
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.replace(".", "", 1).isdigit():
            return float(number) * factor
    raise UserError(f"memory={memory!r} is not a size; give for example 70GB")


def rows_of(graph: Graph) -> int:
    """Returns the size of the first dimension of the inputs: the rows of a batch."""
    sizes = [
        node.outputs[0].shape[0]
        for node in graph.nodes
        if node.kind == "input" and node.outputs[0] and node.outputs[0].shape
    ]
    return Counter(sizes).most_common(1)[0][0] if sizes else 1


def meshes(graph: Graph, devices: int) -> list[Setting]:
    """Returns the settings to search: each split of the devices into `dp` and `tp`.

    Raises:
        UserError: no `dp` divides the rows of the batch.
    """
    rows = rows_of(graph)
    sizes = [tp for tp in range(1, min(devices, WIDEST_TP) + 1) if devices % tp == 0 and (tp == 1 or tp % TRIED == 0)]
    even = [tp for tp in sizes if rows % (devices // tp) == 0]
    if not even:
        least = devices // max(sizes)
        raise UserError(
            f"the example inputs have {rows} rows, which {devices} devices cannot share: dp is at least {least} here; "
            f"give a multiple of {least} rows, or {nearest_devices(rows, devices)} devices"
        )
    both = (False, True) if graph.repeats else (False,)
    return [Setting(devices // tp, tp, recompute) for tp in even for recompute in both]


def nearest_devices(rows: int, devices: int) -> int:
    """Returns the largest number of devices, at most `devices`, that can share rows."""
    sizes = [1 << power for power in range(WIDEST_TP.bit_length())]
    return max(dp * tp for dp in range(1, rows + 1) if rows % dp == 0 for tp in sizes if dp * tp <= devices)


def solve_setting(search: Search, hardware: Hardware, setting: Setting, limit: float, seconds: float) -> None:
    """Adds the best choice for one setting, or the memory that it needs at least."""
    prices = Prices(search.space, hardware, setting, compute_dtype(search.space.graph))
    priced = [prices.options(place) for place in range(len(search.space.steps))]
    options = [[option for option, _ in each] for each in priced]
    inputs = [[(ref.node, ref.index) for ref in step.inputs] for step in search.space.steps]
    ends = [((one.node, one.index), (two.node, two.index)) for one, two in search.space.ends]
    problem = Problem(options, inputs, ends)
    least = sum(min((one.memory for one in each), default=0.0) for each in options)
    choice = solve(problem, limit, seconds) if least <= limit else None
    if choice is None:
        search.needed[setting] = least
        return
    strategies = [each[number][1] for each, number in zip(priced, choice.options, strict=True)]
    search.found.append(Found(setting, choice, strategies, prices))


def compute_dtype(graph: Graph) -> str:
    """Returns the name of the dtype of most elements of parameters."""
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        if node.outputs and node.outputs[0] is not None and node.kind in ("parameter", "input"):
            name = str(node.outputs[0].dtype).removeprefix("torch.")
            counts[name] += node.outputs[0].bytes if name in DTYPES else 0
    return counts.most_common(1)[0][0] if counts and counts.most_common(1)[0][1] else "float32"

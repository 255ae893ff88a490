"""Finds the fastest plan for a module on a number of devices."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weft.errors import UserError
from weft.formatting import byte_size
from weft.planner.hardware import Hardware, hardware_of, load_hardware
from weft.planner.parallelize.capture import capture, split_example
from weft.planner.parallelize.graph import Graph
from weft.planner.parallelize.plan import Plan
from weft.planner.parallelize.pricing import DTYPES, Calls, Prices, Setting, Steps
from weft.planner.parallelize.solve import Problem, solve
from weft.planner.parallelize.space import Space
from weft.planner.parallelize.stage_search import (
    Staged,
    best_stages,
    can_have_stages,
    stage_settings,
    with_stages,
)
from weft.planner.parallelize.strategies import TRIED, Trials
from weft.planner.parallelize.tables import Found, Search, make_plan, splits
from weft.planner.plan import capacity

GENERIC = "h100-sxm"  # the hardware file where neither a file is named nor a GPU is found
USABLE = 0.9  # fraction of a device's memory for parameters, gradients, moments and activations
STAGES_PAY = (
    0.9  # of the seconds without stages: a simulated schedule has neither waiting for late ranks nor its own work
)
WIDEST_TP = 64  # ranks of the tensor axes at most
SECOND_AXIS_PAYS = 0.95  # of the seconds with one tensor axis, which a reader understands sooner
MOST_WITH_PAIRS = 2  # numbers of data ranks for which two tensor axes are tried


def search_plan(
    module: nn.Module | Callable[[], nn.Module],
    example_inputs: Any,
    *,
    devices: int,
    hardware: str | Hardware | None = None,
    memory: str | float | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    seconds: float = 60.0,
    steps: Steps | None = None,
) -> tuple[Plan, Search, Found]:
    """Returns the fastest plan for a module, and how it was found; for the arguments see `weft.parallelize`.

    Args:
        seconds: time limit of the solver for all meshes together.
        steps: the steps for which plans are compared; by default, calls with the example inputs.
    """
    if not isinstance(devices, int) or devices < 1:
        raise UserError(f"devices={devices!r} is not supported; give the number of devices, 1 or more")
    start = time.perf_counter()
    machine = hardware if isinstance(hardware, Hardware) else load_hardware(hardware or this_machine())
    model = module if isinstance(module, nn.Module) else _built(module)
    graph = capture(model, example_inputs, loss)
    captured = time.perf_counter()
    steps = steps or Calls()
    settings = [
        replace(one, split=steps.splits(graph.rows, 1, one.dp, "1f1b")[0], widening=steps.widening)
        for one in meshes(graph, devices)
    ]
    search = Search(Space(graph, Trials()))
    search.seconds.update(capture=captured - start, trials=time.perf_counter() - captured)
    limit = memory_bytes(memory, machine)
    for setting in settings:
        if (setting.dp, setting.tp) not in search.unlimited:  # memory decides nothing: the settings before are faster
            solve_setting(search, machine, setting, limit, seconds / len(settings))
    pairs = _on_two_axes(search, machine, devices, limit, seconds)
    staged = _staged(search, machine, devices, limit, seconds, steps) if steps.stages else None
    if not search.found and staged is None:
        raise UserError(_too_large(type(model).__name__, search, devices, limit))
    search.seconds["solver"] = time.perf_counter() - start - sum(search.seconds.values())
    best = min(search.found, key=lambda one: one.choice.cost, default=None)
    second = min(pairs, key=lambda one: one.choice.cost, default=None)
    if best is not None and second is not None and second.choice.cost < SECOND_AXIS_PAYS * best.choice.cost:
        best = second
    if staged is not None and (best is None or staged.seconds < STAGES_PAY * best.choice.cost):
        plan = make_plan(model, search, staged.found, machine)
        try:
            return with_stages(plan, staged, model, split_example(example_inputs), loss), search, staged.found
        except UserError:  # the forward cannot be cut there
            if best is None:
                raise
    assert best is not None
    return make_plan(model, search, best, machine), search, best


def _on_two_axes(search: Search, hardware: Hardware, devices: int, limit: float, seconds: float) -> list[Found]:
    """Returns plans with two tensor axes, for the numbers of data ranks whose plans with one axis are fastest.

    Plans in which one axis splits nothing are left out: they are those of fewer devices.
    """
    best, inner = dict[int, Setting](), Search(search.space)
    for one in sorted(search.found, key=lambda one: one.choice.cost):
        if one.setting.tp >= 2 * TRIED:
            best.setdefault(one.setting.dp, one.setting)
    for setting in list(best.values())[:MOST_WITH_PAIRS]:
        for tp in range(TRIED, setting.tp // TRIED + 1, TRIED):
            if setting.tp % (tp * TRIED) == 0:
                pair = replace(setting, tp=tp, tp2=setting.tp // tp)
                solve_setting(inner, hardware, pair, limit, seconds / 16)
    return [one for one in inner.found if one.prices.first and splits(one.prices.first) and splits(one.strategies)]


def _staged(
    search: Search, hardware: Hardware, devices: int, limit: float, seconds: float, steps: Steps
) -> Staged | None:
    """Returns the fastest plan with pipeline stages; None if the module can have none, or none fits."""
    graph = search.space.graph
    found: list[Staged] = []
    for pp in stage_settings(devices) if can_have_stages(graph) else ():
        inner, unlimited = Search(search.space), set[tuple[int, int]]()
        for setting in meshes(graph, devices // pp, lenient=True):
            splits, mesh = steps.splits(graph.rows, pp, setting.dp, "1f1b"), (setting.dp, setting.tp)
            if not splits or not setting.reshard or mesh in unlimited:
                continue
            setting = replace(setting, pp=pp, split=splits[len(splits) // 2], widening=steps.widening)
            one = solve_setting(inner, hardware, setting, limit * pp, seconds / 8)
            if one is not None:
                best, all_fit = best_stages(one, hardware, steps, limit)
                found += [best] if best is not None else []
                unlimited |= {mesh} if all_fit else set()
    return min(found, key=lambda one: one.seconds, default=None)


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


def meshes(graph: Graph, devices: int, *, lenient: bool = False) -> list[Setting]:
    """Returns the settings to search: each split of the devices into `dp` and `tp`, the fastest of each split first.

    Raises:
        UserError: no `dp` divides the rows of the batch.
    """
    rows = graph.rows
    sizes = [tp for tp in range(1, min(devices, WIDEST_TP) + 1) if devices % tp == 0 and (tp == 1 or tp % TRIED == 0)]
    even = [tp for tp in sizes if rows % (devices // tp) == 0]
    if not even and not lenient:
        least = devices // max(sizes)
        raise UserError(
            f"the example inputs have {rows} rows, which {devices} devices cannot share: dp is at least {least} here; "
            f"give a multiple of {least} rows, or {nearest_devices(rows, devices)} devices"
        )
    found = [
        Setting(devices // tp, tp, recompute, reshard=reshard)
        for tp in even
        for recompute in ((False, True) if graph.repeats else (False,))
        for reshard in ((False, True) if devices > tp else (True,))
    ]
    return found


def nearest_devices(rows: int, devices: int) -> int:
    """Returns the largest number of devices, at most `devices`, that can share rows."""
    sizes = [1 << power for power in range(WIDEST_TP.bit_length())]
    return max(dp * tp for dp in range(1, rows + 1) if rows % dp == 0 for tp in sizes if dp * tp <= devices)


def solve_setting(search: Search, hardware: Hardware, setting: Setting, limit: float, seconds: float) -> Found | None:
    """Adds the best choice for one setting to the search, and returns it; None if none fits the memory.

    Of two tensor axes, the outer is decided first, as in the recursive partitions of Tofu (Wang et al., 2019): the
    ranks of the inner axis do the same until it is decided what each of them does.
    """
    dtype = compute_dtype(search.space.graph)
    prices = Prices(search.space, hardware, setting, dtype)
    if setting.tp2 > 1:
        outer = _solved(Search(search.space), prices, limit * setting.tp2, seconds)
        if outer is None:
            return None
        prices = Prices(search.space, hardware, setting, dtype, outer.strategies)
    return _solved(search, prices, limit, seconds)


def _solved(search: Search, prices: Prices, limit: float, seconds: float) -> Found | None:
    """Adds the best choice by some prices to the search, and returns it; None if none fits the memory."""
    setting = prices.setting
    priced = [prices.options(place) for place in range(len(search.space.steps))]
    options = [[option for option, _ in each] for each in priced]
    inputs = [[(ref.node, ref.index) for ref in step.inputs] for step in search.space.steps]
    ends = [((one.node, one.index), (two.node, two.index)) for one, two in search.space.ends]
    problem = Problem(options, inputs, ends)
    least = sum(min((one.memory for one in each), default=0.0) for each in options)
    choice = solve(problem, None, seconds) if least <= limit else None
    if choice is not None and choice.memory > limit:
        choice = solve(problem, limit, seconds)
    elif choice is not None:
        search.unlimited.add((setting.dp, setting.tp))
    if choice is None:
        search.needed[setting] = least
        return None
    strategies = [each[number][1] for each, number in zip(priced, choice.options, strict=True)]
    search.found.append(Found(setting, choice, strategies, prices))
    return search.found[-1]


def compute_dtype(graph: Graph) -> str:
    """Returns the name of the dtype of most elements of parameters."""
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        if node.outputs and node.outputs[0] is not None and node.kind in ("parameter", "input"):
            name = str(node.outputs[0].dtype).removeprefix("torch.")
            counts[name] += node.outputs[0].bytes if name in DTYPES else 0
    return counts.most_common(1)[0][0] if counts and counts.most_common(1)[0][1] else "float32"

"""Makes a hardware file of what the ranks of this machine measured."""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch

from weft.config.run import RunConfig
from weft.formatting import counted
from weft.planner.hardware import load_hardware
from weft.planner.hardware_files import NOT_MEASURED
from weft.planner.measure import DeviceMeasurement, device_name
from weft.planner.units import Job
from weft.planner.work import block_kinds, block_work, head_work
from weft.processes import available_memory, usable_cores

HALF_SIZES = tuple(math.exp(step / 50) for step in range(451))  # 1 to 8,000; candidates for `matmul_half_size`
# Links of a new file, until they are measured: gloo on one host, and PCIe.
LINKS = {
    "cpu": {"latency_us": 100.0, "bandwidth_gb_s": 1.0},
    "cuda": {"latency_us": 10.0, "bandwidth_gb_s": 20.0},
}
GUESSED_WATTS = {"cpu": 15.0, "cuda": 400.0}  # of a thread, and of a GPU


def fit_products(measured: Mapping[str, Mapping[int, float]], peaks: Mapping[str, float]) -> tuple[dict, float]:
    """Fits the rates of matrix products, `peak * efficiency * s / (s + half)`, to the seconds of square products.

    Args:
        measured: seconds by dtype and size s.
        peaks: peak FLOP/s by dtype, which limits the efficiency.

    Returns:
        The efficiency of each dtype, and one `half` for all dtypes, with the smallest squared error of log seconds.
    """

    def fit(half: float) -> tuple[float, dict[str, float]]:
        error, found = 0.0, {}
        for name, times in measured.items():
            logs = [math.log(2 * s**3 / t * (s + half) / s / peaks[name]) for s, t in times.items()]
            found[name] = min(1.0, math.exp(statistics.mean(logs)))
            error += sum((one - math.log(found[name])) ** 2 for one in logs)
        return error, found

    half = min(HALF_SIZES, key=lambda one: fit(one)[0])
    return fit(half)[1], half


def mean_of_ranks(found: Sequence[DeviceMeasurement]) -> DeviceMeasurement:
    """Returns the mean of what ranks measured. Sizes that some rank did not measure are left out."""
    first, products = found[0], {}
    for name in first.products:
        sizes = set.intersection(*(set(one.products[name]) for one in found))
        products[name] = {size: statistics.mean(one.products[name][size] for one in found) for size in sorted(sizes)}
    names = ("attention", "bandwidth", "elementwise", "launch", "to_device")
    return DeviceMeasurement(
        products,
        peaks={name: statistics.mean(one.peaks[name] for one in found) for name in first.peaks},
        operators={key: statistics.mean(one.operators[key] for one in found) for key in first.operators},
        **{name: statistics.mean(getattr(one, name) for one in found) for name in names},
    )


def device_tree(found: DeviceMeasurement, device: torch.device, ranks: int, date: str) -> dict[str, Any]:
    """Returns a hardware file, as plain data. Links and, on CPUs, the power are guesses, as `source` says.

    Args:
        found: the mean of what ranks measured.
        ranks: number of ranks that measured at the same time, on this host.
        date: the date for `source`.
    """
    efficiency, half = fit_products(found.products, found.peaks)
    main = next(iter(found.products))
    bandwidth = max(found.bandwidth, found.elementwise)
    power, power_source = _power(device)
    links = LINKS[device.type]
    source = {"device": f"weft bench device, {date}; {counted(ranks, 'process', 'processes')} at the same time"}
    source["device.power_w"] = power_source
    source["levels"] = f"{NOT_MEASURED}; measure it: weft bench comm --nproc N --into FILE"
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else available_memory() / ranks
    tree: dict[str, Any] = {
        "description": f"this machine, measured with {counted(ranks, 'process', 'processes')}",
        "device": {
            "name": device_name(device),
            **({"kind": "cpu"} if device.type == "cpu" else {}),
            "memory_gb": memory / 1e9,
            "peak_tflops": {name: peak / 1e12 for name, peak in found.peaks.items()},
            "matmul_efficiency": efficiency,
            "matmul_half_size": half,
            "attention_efficiency": min(1.0, found.attention / found.peaks[main]),
            "memory_bandwidth_gb_s": bandwidth / 1e9,
            "memory_efficiency": found.elementwise / bandwidth,
            "launch_us": found.launch * 1e6,
            "power_w": power,
        },
        "levels": [{"name": "host", **links}],
        "host": {
            "memory_gb": psutil.virtual_memory().total / 1e9,
            "to_device_gb_s": found.to_device / 1e9,
            "cores": usable_cores(),
        },
        "source": source,
    }
    if found.operators:
        tree["operators"] = [
            {"op": op, "shape": list(shape), "dtype": dtype, "microseconds": seconds * 1e6}
            for (op, shape, dtype), seconds in found.operators.items()
        ]
    return tree


def _power(device: torch.device) -> tuple[float, str]:
    """Returns watts, and their source: a GPU's power limit; a guess for a CPU, whose counters only root can read."""
    program = shutil.which("nvidia-smi") if device.type == "cuda" else None
    if program is not None:
        query = [program, f"--id={device.index or 0}", "--query-gpu=power.limit", "--format=csv,noheader,nounits"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
        if answer.replace(".", "", 1).isdigit():
            return float(answer), "the power limit, by nvidia-smi"
    watts = GUESSED_WATTS[device.type] * (torch.get_num_threads() if device.type == "cpu" else 1)
    return watts, NOT_MEASURED


def run_operators(config: RunConfig, ranks: int, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Returns the matrix products and attention of a run on one of `ranks` ranks, to be measured one by one.

    Args:
        config: a checked config; its mesh and sizes determine the shapes.
        dtype: the compute dtype.
    """
    training = config.training.model_copy(update={"dtype": dtype, "fp8": False})
    config = config.model_copy(update={"training": training})
    job = Job(
        config, ranks, load_hardware("cpu-generic")
    )  # for shapes only, so any hardware file with the dtype will do
    works = [block_work(job.shares, layer) for layer in range(len(block_kinds(job.model)))]
    works.append(head_work(job.shares, job.vocabulary))
    products = [("matmul", (one.m, one.k, one.n), dtype) for work in works for one in work.matmuls]
    attention = [("attention", work.attention.shape, dtype) for work in works if work.attention is not None]
    return list(dict.fromkeys([*products, *attention]))

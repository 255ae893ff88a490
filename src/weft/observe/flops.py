"""Computes the model FLOP/s utilization (MFU), the peak FLOP/s of devices, and the peak memory."""

from __future__ import annotations

import re
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache

import torch

from weft.formatting import counted
from weft.observe.flop_count import FLOPS_PER_TOKEN

DEFINITION = (
    f"MFU = tokens/s x ({FLOPS_PER_TOKEN}) / peak FLOP/s of all devices used. "
    "Tokens are counted once per data-parallel group. Embedding look-ups and recomputation are not counted. "
    "Frozen matmul parameters count 4 instead of 6."
)


def mfu(tokens_per_second: float, flops_per_token: float, peak_total: float) -> float:
    """Returns the model FLOP/s utilization: the fraction (0 to 1) of the peak FLOP/s that the model's arithmetic uses.

    Args:
        tokens_per_second: throughput of the complete job; each token counts once.
        flops_per_token: FLOPs of forward and backward for one token.
        peak_total: peak FLOP/s, summed over all devices of the job.
    """
    return tokens_per_second * flops_per_token / peak_total


@dataclass(frozen=True)
class Peak:
    """The peak FLOP/s of a device. On a CPU, a device is one process with its threads.

    Attributes:
        flops_per_second: dense FLOP/s in the requested dtype.
        origin: the source of the number: `table: NVIDIA H100 SXM, bfloat16`, or `measured with a ... matmul ...`.
    """

    flops_per_second: float
    origin: str


# Published dense TFLOP/s in bfloat16, float16, float32 (not TF32, which Weft does not enable), fp8 and float64. None:
# unsupported or unpublished, so the peak is measured. The first pattern that matches torch's name of the device wins.
# Consumer cards: with float32 accumulation, as in training.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float64)
_TABLE: list[tuple[str, str, tuple[float | None, ...]]] = [
    ("NVIDIA GB300", r"\bGB300\b", (2500, 2500, None, 5000, None)),
    ("NVIDIA B300", r"\bB300\b", (2250, 2250, None, 4500, None)),
    ("NVIDIA GB200", r"\bGB200\b", (2500, 2500, 80, 5000, 40)),
    ("NVIDIA B200", r"\bB200\b", (2250, 2250, 75, 4500, 37)),
    ("NVIDIA H200 NVL", r"\bH200 NVL\b", (835.5, 835.5, 60, 1671, 60)),
    ("NVIDIA H200 SXM", r"\bH200\b", (989.4, 989.4, 66.9, 1978.9, 66.9)),
    ("NVIDIA GH200", r"\bGH200\b", (989.4, 989.4, 66.9, 1978.9, 66.9)),
    ("NVIDIA H100 PCIe", r"\bH100 PCIe\b", (756.5, 756.5, 51.2, 1513, 51.2)),
    ("NVIDIA H100 NVL", r"\bH100 NVL\b", (835.5, 835.5, 60, 1671, 60)),
    ("NVIDIA H100 SXM", r"\bH100\b", (989.4, 989.4, 66.9, 1978.9, 66.9)),
    ("NVIDIA H800", r"\bH800\b(?!.*PCIe)", (989.4, 989.4, 66.9, 1978.9, None)),
    ("NVIDIA H20", r"\bH20\b", (148, 148, 44, 296, None)),
    ("NVIDIA A100", r"\bA100\b", (312, 312, 19.5, None, 19.5)),
    ("NVIDIA A800", r"\bA800\b", (312, 312, 19.5, None, None)),
    ("NVIDIA A30", r"\bA30\b", (165, 165, 10.3, None, 10.3)),
    ("NVIDIA A40", r"\bA40\b", (149.7, 149.7, 37.4, None, None)),
    ("NVIDIA A10", r"\bA10\b", (125, 125, 31.2, None, None)),
    ("NVIDIA A10G", r"\bA10G\b", (70, 70, None, None, None)),
    ("NVIDIA L40S", r"\bL40S\b", (362, 362, 91.6, 733, None)),
    ("NVIDIA L40", r"\bL40\b", (181, 181, 90.5, 362, None)),
    ("NVIDIA L4", r"\bL4\b", (121, 121, 30.3, 242, None)),
    ("NVIDIA RTX 6000 Ada", r"\bRTX 6000 Ada\b", (364.2, 364.2, 91.1, 728.5, None)),
    ("NVIDIA RTX A6000", r"\bRTX A6000\b", (154.8, 154.8, 38.7, None, None)),
    ("NVIDIA RTX 5090", r"\bRTX 5090$", (209.5, 209.5, 104.8, 419, None)),
    ("NVIDIA RTX 4090", r"\bRTX 4090$", (165.2, 165.2, 82.6, 330.3, None)),
    ("NVIDIA RTX 3090", r"\bRTX 3090$", (71, 71, 35.6, None, None)),
    ("NVIDIA V100S PCIe", r"\bV100S\b", (None, 130, 16.4, None, 8.2)),
    ("NVIDIA V100 PCIe", r"\bV100-PCIE", (None, 112, 14, None, 7)),
    ("NVIDIA V100 SXM2", r"\bV100\b", (None, 125, 15.7, None, 7.8)),
    ("NVIDIA T4", r"\bT4\b", (None, 65, 8.1, None, None)),
    ("AMD MI355X", r"\bMI355X", (2516.6, 2516.6, 157.3, 5033.2, 78.6)),
    ("AMD MI350X", r"\bMI350X", (2306.9, 2306.9, 144.2, 4613.7, 72.1)),
    ("AMD MI325X", r"\bMI325X", (1307.4, 1307.4, 163.4, 2614.9, 163.4)),
    ("AMD MI300X", r"\bMI300X", (1307.4, 1307.4, 163.4, 2614.9, 163.4)),
    ("AMD MI300A", r"\bMI300A", (980.6, 980.6, 122.6, 1961.2, 122.6)),
    # torch treats each of the two dies of these modules as a device, with half of the published number.
    ("AMD MI250X, one of two dies", r"\bMI250X", (191.5, 191.5, 47.9, None, 47.9)),
    ("AMD MI250, one of two dies", r"\bMI250\b", (181, 181, 45.3, None, 45.3)),
]


def table_peak(device_name: str, dtype: torch.dtype) -> Peak | None:
    """Returns the published peak of a device; None if the table does not list the peak.

    The table lists neither slices of a device (MIG) nor laptop versions of desktop cards.

    Args:
        device_name: the name that `torch.cuda.get_device_name` returns.
    """
    if re.search(r"\bMIG\b|Laptop|Max-Q", device_name):
        return None
    for name, pattern, peaks in _TABLE:
        if re.search(pattern, device_name, re.IGNORECASE):
            column = torch.float8_e4m3fn if str(dtype).startswith("torch.float8") else dtype
            teraflops = dict(zip(_DTYPES, peaks, strict=True)).get(column)
            return None if teraflops is None else Peak(teraflops * 1e12, f"table: {name}, {_name(dtype)}")
    return None


def device_peak(device: torch.device | str, dtype: torch.dtype) -> Peak:
    """Returns the peak of a device in a dtype: from the table, or measured in a quarter of a second, once per process.

    On a CPU, this is the peak of this process with its threads (`torch.get_num_threads()`). Set the number of threads
    first, and call this function on all ranks of a machine at the same time.
    """
    return _device_peak(torch.device(device), dtype, torch.get_num_threads())


@cache
def _device_peak(device: torch.device, dtype: torch.dtype, threads: int) -> Peak:
    if device.type == "cuda":
        published = table_peak(torch.cuda.get_device_name(device), dtype)
        if published is not None:
            return published
    if dtype.itemsize == 1:  # a plain matmul does not support it
        peak = measured_peak(device, torch.bfloat16)
        return Peak(peak.flops_per_second, f"{peak.origin}, in place of {_name(dtype)}")
    return measured_peak(device, dtype)


def measured_peak(device: torch.device | str, dtype: torch.dtype, seconds: float = 0.2) -> Peak:
    """Measures square matmuls of several sizes in `dtype` for about `seconds` seconds, and returns the highest rate.

    Each size is measured repeatedly, because on a busy CPU one matmul may take a hundred times as long as the next, and
    a peak that is too low would inflate the MFU.

    Raises:
        RuntimeError: the device has no matmul in this dtype.
    """
    device = torch.device(device)
    sizes = (512, 1024, 2048) if device.type == "cpu" else (2048, 4096, 8192)
    best, best_size = 0.0, sizes[0]
    began = time.perf_counter()
    for number, size in enumerate(sizes, start=1):
        if best and (2 * 2 * size**3 / best > seconds or time.perf_counter() - began > seconds):
            break  # the remaining time is too short for two matmuls of this size
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.mm(a, b)  # initializes the kernel, too
        for run in range(64):
            _synchronize(device)
            start = time.perf_counter()
            torch.mm(a, b, out=out)
            _synchronize(device)
            end = time.perf_counter()
            if (rate := 2 * size**3 / (end - start)) > best:
                best, best_size = rate, size
            if end - began > seconds * number / len(sizes) and (run >= 2 or end - began > 2 * seconds):
                break
    by = f"on {counted(torch.get_num_threads(), 'CPU thread')}"
    if device.type != "cpu":
        by = f"on one {torch.cuda.get_device_name(device) if device.type == 'cuda' else f'{device.type} device'}"
    return Peak(best, f"measured with a {best_size} x {best_size} {_name(dtype)} matmul {by}")


def total_peak(peaks: list[Peak]) -> Peak:
    """Sums the peaks of a job's devices. The result's `origin` lists the number of devices with each origin."""
    origins = Counter(peak.origin for peak in peaks)
    text = "; ".join(f"{count} x {origin}" if len(peaks) > 1 else origin for origin, count in origins.items())
    return Peak(sum(peak.flops_per_second for peak in peaks), text)


def memory_bytes(device: torch.device | str) -> int:
    """Returns this process's peak memory so far, in bytes: GPU memory for a GPU, resident memory for a CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if peak <= _peak_before_exec() and (own := _resident_peak()) is not None:
        peak = own
    return peak if sys.platform == "darwin" else peak * 1024


@cache
def _peak_before_exec() -> int:
    """Returns the `ru_maxrss` that this process has of the program that it was before exec; 0 if it has exceeded that.

    As long as it has not, its own peak is in /proc/self/status, whose reading takes 20 times as long.
    """
    own, peak = _resident_peak(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if own is not None and own < peak else 0


def _resident_peak() -> int | None:
    """Returns the peak resident memory of this program in KiB; None on systems other than Linux."""
    try:
        with open("/proc/self/status", "rb") as status:
            return next((int(line.split()[1]) for line in status if line.startswith(b"VmHWM:")), None)
    except OSError:
        return None


def memory_kind(device: torch.device | str) -> str:
    """Describes the memory that `memory_bytes` counts for this device, as a text for the report."""
    if torch.device(device).type == "cuda":
        return "peak memory allocated on the first rank's GPU"
    return "peak resident memory of the first rank's process"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

"""Measures a device: matrix products, attention, element-wise operations, launches and copies.

The result is the part of a hardware file that `weft.planner.compute` uses. On a CPU, a device is one process with its
threads; the processes of all ranks measure at the same time, because they share the host's memory bandwidth.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from weft.config.model import ModelSection
from weft.formatting import counted
from weft.kernels.linear import linear
from weft.models.decoder import Decoder
from weft.observe.flops import device_peak
from weft.observe.manifest import cpu_model
from weft.planner.compute import BACKWARD_OPERATIONS
from weft.planner.work import Shares, block_work, embedding_work, head_work

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)  # of square matrix products
BATCH = 1e-3  # seconds of calls between two looks at the clock: synchronizing a GPU takes microseconds
HEAD_DIM = 128  # of `attention_efficiency`
ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 26}  # of tensors for element-wise operations: larger than the caches
BUFFER = {"cpu": 1 << 27, "cuda": 1 << 30}  # bytes of the buffer that is copied to measure memory bandwidth
BUSY = 0.7  # load average from which a machine counts as busy
NEXT = 6  # a size is measured only if its first call is expected to fit this many times in its seconds


@dataclass
class DeviceMeasurement:
    """What one rank measured.

    Attributes:
        products: seconds of square matrix products by dtype and size.
        peaks: peak FLOP/s by dtype, from a table, or the highest measured rate.
        attention: FLOP/s of the forward pass of fused attention.
        bandwidth: bytes per second of a large copy; reads and writes count.
        elementwise: bytes per second of element-wise operations with new outputs.
        launch: seconds that the host needs for one operation of a decoder.
        to_device: bytes per second of copies from the host to the device.
        operators: seconds by (op, shape, dtype).
    """

    products: dict[str, dict[int, float]] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    attention: float = 0.0
    bandwidth: float = 0.0
    elementwise: float = 0.0
    launch: float = 0.0
    to_device: float = 0.0
    operators: dict[tuple[str, tuple[int, ...], str], float] = field(default_factory=dict)


def device_name(device: torch.device) -> str:
    """Returns the name of a device in a hardware file: the GPU's, or the CPU's with the threads of this process."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model() or 'CPU'}, {counted(torch.get_num_threads(), 'thread')}"


def call_seconds(act: Callable[[], Any], device: torch.device, budget: float) -> float:
    """Returns the lower quartile of the seconds of calls, over about `budget` seconds and at least three times.

    Other programs only make calls slower, so on a busy machine the lower quartile is closer to the device than the
    median; on an idle machine both are equal.
    """
    act()
    first = _timed(act, device, 1)
    count = max(1, min(1000, int(BATCH / max(first, 1e-7))))
    began, found = time.perf_counter(), []
    while len(found) < 3 or time.perf_counter() - began < budget:
        found.append(_timed(act, device, count))
    return lower_quartile(found)


def lower_quartile(values: Sequence[float]) -> float:
    """Returns the value that a quarter of the values do not exceed."""
    return sorted(values)[(len(values) - 1) // 4]


def busy_warning() -> str | None:
    """Returns a warning if other programs use this machine, which makes measurements too slow; None if it is idle."""
    load = os.getloadavg()[0]
    if load < BUSY:
        return None
    return f"other programs use this machine (load average {load:.1f}); the measured numbers will be too slow"


def _timed(act: Callable[[], Any], device: torch.device, count: int) -> float:
    synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        act()
    synchronize(device)
    return (time.perf_counter() - began) / count


def synchronize(device: torch.device) -> None:
    """Waits for all operations of a GPU; a CPU has none that are unfinished."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure_device(
    device: torch.device,
    dtypes: Sequence[str],
    seconds: float,
    *,
    operators: Iterable[tuple[str, tuple[int, ...], str]] = (),
    progress: Callable[[str], None] = lambda what: None,
    barrier: Callable[[], None] = lambda: None,
) -> DeviceMeasurement:
    """Measures a device for about `seconds` seconds.

    Args:
        dtypes: dtypes of matrix products. The first is that of attention and of element-wise operations.
        operators: operations to measure one by one, as (op, shape, dtype) of `hardware.MeasuredOperator`.
        progress: called with the name of the next measurement.
        barrier: waits for the ranks that measure at the same time.
    """
    found, wanted = DeviceMeasurement(), list(operators)
    share = seconds / (len(dtypes) + 1 + 0.5 * bool(wanted))
    for name in dtypes:
        progress(f"matrix products in {name}")
        barrier()
        found.products[name] = _products(device, name, share * 0.9)
        fastest = max(2 * size**3 / one for size, one in found.products[name].items())
        known = device_peak(device, DTYPES[name]).flops_per_second if device.type == "cuda" else fastest
        found.peaks[name] = max(known, fastest)
    with torch.no_grad():
        tests = {
            "attention": _attention,
            "bandwidth": _bandwidth,
            "elementwise": _elementwise,
            "to_device": _to_device,
        }
        for name, act in tests.items():
            progress(name.replace("_", " "))
            barrier()
            setattr(found, name, act(device, DTYPES[dtypes[0]], share / 5))
    barrier()
    found.launch = _launch(device, share / 10)
    for number, one in enumerate(wanted):
        progress(f"operation {number + 1} of {len(wanted)}")
        barrier()
        found.operators[one] = _operator(device, one, 0.5 * share / len(wanted))
    return found


def _products(device: torch.device, name: str, budget: float) -> dict[int, float]:
    """Returns the seconds of square products by size, for sizes that fit in the budget.

    They are the products of a linear layer in training, forward and backward, by the function that training calls.
    """
    found: dict[int, float] = {}
    sizes = SIZES if device.type == "cuda" else SIZES[:-1]
    for size in sizes:
        if found and 3 * 8 * NEXT * found[max(found)] > budget / 2:
            break
        weight, inputs = (torch.randn(size, size, device=device).to(DTYPES[name]) for _ in range(2))
        found[size] = call_seconds(partial(_products_of_step, inputs, weight), device, budget / len(sizes)) / 3
    return found


def _products_of_step(inputs: torch.Tensor, weight: torch.Tensor) -> None:
    """Computes the three products of a linear layer in training: the output, and the gradients of input and weight."""
    out = linear(inputs.requires_grad_(), weight.requires_grad_())
    torch.autograd.grad(out, (inputs, weight), out.detach())


def _attention(device: torch.device, dtype: torch.dtype, budget: float) -> float:
    heads, length = (16, 4096) if device.type == "cuda" else (2, 1024)
    query, key, value = (torch.randn(1, heads, length, HEAD_DIM, device=device).to(dtype) for _ in range(3))
    act = functional.scaled_dot_product_attention
    seconds = call_seconds(lambda: act(query, key, value, is_causal=True), device, budget)
    return 4 * length * (length + 1) / 2 * heads * HEAD_DIM / seconds


def _bandwidth(device: torch.device, dtype: torch.dtype, budget: float) -> float:
    size = BUFFER[device.type]
    source, target = (torch.ones(size // 4, device=device) for _ in range(2))
    return 2 * size / call_seconds(lambda: target.copy_(source), device, budget)


def _elementwise(device: torch.device, dtype: torch.dtype, budget: float) -> float:
    """Returns bytes per second of a gated activation and a residual sum, in which 8 tensors are read or written."""
    gate, value, residual = (torch.randn(ELEMENTS[device.type], device=device).to(dtype) for _ in range(3))
    seconds = call_seconds(lambda: functional.silu(gate) * value + residual, device, budget)
    return 8 * gate.numel() * gate.element_size() / seconds


def _to_device(device: torch.device, dtype: torch.dtype, budget: float) -> float:
    size = BUFFER[device.type] // 2
    source = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / call_seconds(lambda: target.copy_(source, non_blocking=True), device, budget)


def _launch(device: torch.device, budget: float) -> float:
    """Returns the host's seconds for one operation of a decoder, with the Python code of its modules.

    A decoder without work for the device runs forward and backward, and its time is divided by the number of
    operations that the planner counts.
    """
    section = ModelSection(
        vocab_size=16, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32
    )
    model, length = Decoder(section).to(device), 8
    tokens = torch.arange(length, device=device)[None]
    shares = Shares(section, 1, length)
    works = [block_work(shares, layer) for layer in range(section.num_hidden_layers)]
    count = sum(work.operations for work in (*works, embedding_work(shares, 16), head_work(shares, 16)))

    def act() -> None:
        model(tokens, tokens, labels=tokens).sum().backward()

    with torch.enable_grad():
        return call_seconds(act, device, budget) / (count * (1 + BACKWARD_OPERATIONS))


def _operator(device: torch.device, one: tuple[str, tuple[int, ...], str], budget: float) -> float:
    op, shape, name = one
    if op == "matmul":
        m, k, n = shape
        inputs, weight = (torch.randn(rows, k, device=device).to(DTYPES[name]) for rows in (m, n))
        return call_seconds(partial(_products_of_step, inputs, weight), device, budget) / 3
    batch, heads, groups, length, width = shape
    query, key, value = (
        torch.randn(batch, count, length, width, device=device).to(DTYPES[name]) for count in (heads, groups, groups)
    )
    act = functional.scaled_dot_product_attention
    return call_seconds(lambda: act(query, key, value, is_causal=True, enable_gqa=heads != groups), device, budget)

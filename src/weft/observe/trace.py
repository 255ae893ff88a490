"""Analyzes a profiler's Chrome trace: compute, communication, exposed communication and idle time of each step.

- Compute: on a GPU, kernels (except NCCL's), copies and fills on any stream. On a CPU, torch operators on any thread of
  the process (except collectives and gloo's internal work), and compiled code.
- Communication: on a GPU, NCCL's kernels and gloo's work. On a CPU, gloo's work on its threads, the calls of
  collectives, and waits for collectives in `wait_tensor`. Communication includes the time spent waiting for a late
  rank.
- Exposed communication: communication during which this rank computes nothing.
- Idle: the remaining time of the step (Python, waiting for data).
"""

from __future__ import annotations

import gzip
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

STEP = "weft: step "  # prefix of the name of a step's range; the number of the step follows
DATA = "weft: data"  # the name of the range in which a step waits for its batch

Interval = tuple[float, float]

COLLECTIVE_CALLS = ("c10d::", "_c10d_functional")
NOT_COMPUTE = (*COLLECTIVE_CALLS, "autograd::", "torch::autograd::", "profiler::")
COMPILED = ("Torch-Compiled Region", "CompiledFunction")
COMPILED_GRAPH = "## Call CompiledFxGraph "
# Ranges of gloo's sends and receives are on the calling thread, which computes meanwhile. Gloo's other ranges are on
# gloo's threads.
NONBLOCKING = ("gloo:send", "gloo:recv")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
ITEM_BYTES = {
    **dict.fromkeys(("double", "long", "long int"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "short int"), 2),
    **dict.fromkeys(("unsigned char", "signed char", "char", "byte", "bool"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 1),
}


class Event(NamedTuple):
    """A range on a host thread or a device stream. Times are in microseconds."""

    name: str
    category: str
    start: float
    end: float
    thread: Any
    args: dict[str, Any]


class MemoryEvent(NamedTuple):
    """An allocation (`bytes` > 0) or a release (`bytes` < 0) of memory.

    `time` is in microseconds. `total` is the number of bytes that are allocated on the device afterwards. `device` is
    the type and index of the device; (0, -1) is the CPU.
    """

    time: float
    address: int
    bytes: int
    total: int
    device: tuple[int, int]


@dataclass(frozen=True)
class Trace:
    """The events and allocations of a trace, sorted by time."""

    events: list[Event]
    memory: list[MemoryEvent]

    @property
    def on_device(self) -> bool:
        """Whether the trace contains GPU work."""
        return any(event.category in DEVICE_WORK for event in self.events)

    @property
    def steps(self) -> dict[int, Interval]:
        """Maps each step number to the start and end of the step in microseconds."""
        ranges = (e for e in self.events if e.category == "user_annotation" and e.name.startswith(STEP))
        return {int(e.name.removeprefix(STEP)): (e.start, e.end) for e in ranges}


@dataclass(frozen=True)
class StepTimes:
    """The times of one step in seconds: compute + exposed + idle = seconds.

    `exposed` is the exposed communication. `data` is the time spent waiting for the batch.
    """

    step: int
    seconds: float
    compute: float
    communication: float
    exposed: float
    idle: float
    data: float


@dataclass(frozen=True)
class Work:
    """Totals of one operator, kernel or collective over the recorded steps of one rank.

    Attributes:
        seconds: total duration. For an operator on a CPU, the time in operators that it calls is left out.
        bytes: for collectives, the total size of the rank's inputs; None if unknown.
        exposed: for collectives, the seconds of their duration during which this rank computes nothing.
    """

    name: str
    calls: int
    seconds: float
    bytes: int | None = None
    exposed: float | None = None


# --- Interval arithmetic. A union is a sorted list of intervals that do not touch.


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorts intervals, merges intervals that overlap or touch, and drops empty intervals."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def subtract(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Returns the parts of `one` that are outside `other`. Both are results of `union`."""
    left: list[Interval] = []
    at = 0
    for start, end in one:
        while at < len(other) and other[at][1] <= start:
            at += 1
        here = at
        while here < len(other) and other[here][0] < end:
            if other[here][0] > start:
                left.append((start, other[here][0]))
            start = max(start, other[here][1])
            here += 1
        if start < end:
            left.append((start, end))
    return left


def clip(one: Sequence[Interval], window: Interval) -> list[Interval]:
    """Returns the parts of `one`, a result of `union`, that are within `window`."""
    return [(max(a, window[0]), min(b, window[1])) for a, b in one if b > window[0] and a < window[1]]


def length(one: Iterable[Interval]) -> float:
    """Returns the total length of intervals. The intervals must not overlap."""
    return math.fsum(end - start for start, end in one)


# --- Parsing


def read_trace(path: str | Path) -> Trace:
    """Reads a trace that `torch.profiler` exported, plain or gzipped."""
    raw = Path(path).read_bytes()
    return parse(orjson.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)["traceEvents"])


def parse(entries: Iterable[dict[str, Any]]) -> Trace:
    """Converts Chrome trace events to a `Trace`. Ignores events that are neither ranges nor allocations."""
    events, memory = [], []
    for entry in entries:
        args = entry.get("args") or {}
        if entry.get("ph") == "X":
            start, thread = float(entry["ts"]), (entry.get("pid"), entry.get("tid"))
            end = start + float(entry.get("dur", 0))
            events.append(Event(entry["name"], entry.get("cat", ""), start, end, thread, args))
        elif entry.get("name") == "[memory]":
            device = (args["Device Type"], args["Device Id"])
            total = args.get("Total Allocated", 0)
            memory.append(MemoryEvent(float(entry["ts"]), args["Addr"], args["Bytes"], total, device))
    events.sort(key=lambda event: (event.start, -event.end))
    memory.sort(key=lambda event: event.time)
    return Trace(events, memory)


# --- Classification of events


def is_communication(event: Event, on_device: bool) -> bool:
    """Whether the event communicates with other ranks or waits for other ranks.

    Args:
        on_device: whether the trace contains GPU work (`Trace.on_device`).
    """
    if event.category == "user_annotation":
        return event.name.startswith("gloo:")
    if on_device:
        return event.category == "kernel" and "nccl" in event.name.lower()
    return event.category == "cpu_op" and event.name.startswith(COLLECTIVE_CALLS)


def is_compute(event: Event, on_device: bool) -> bool:
    """Whether the event computes, or copies data within the machine.

    Args:
        on_device: whether the trace contains GPU work (`Trace.on_device`).
    """
    if on_device:
        return event.category in DEVICE_WORK and not is_communication(event, True)
    if event.category == "user_annotation":
        return event.name.startswith(COMPILED_GRAPH)
    if event.category != "cpu_op" or event.name.startswith(NOT_COMPUTE):
        return False
    # A name without a namespace is an autograd node, which spans its operators and the waits of its hooks.
    return "::" in event.name or event.name.startswith(COMPILED)


def compute_times(trace: Trace) -> list[Interval]:
    """Returns the intervals of time in which this rank computes, sorted and without overlaps."""
    if trace.on_device:
        return union((e.start, e.end) for e in trace.events if is_compute(e, True))
    work, waits = defaultdict(list), defaultdict(list)
    for event in trace.events:
        if is_compute(event, False):
            work[event.thread].append((event.start, event.end))
        elif is_communication(event, False) and not event.name.startswith(NONBLOCKING):
            waits[event.thread].append((event.start, event.end))
    # Copies and sums of a collective on its own thread are communication, and so are waits within compiled code.
    return union(part for thread in work for part in subtract(union(work[thread]), union(waits[thread])))


# --- Reports


def step_times(trace: Trace) -> list[StepTimes]:
    """Computes the `StepTimes` of each step in a trace."""
    on_device, compute = trace.on_device, compute_times(trace)
    communication = union((e.start, e.end) for e in trace.events if is_communication(e, on_device))
    data = union((e.start, e.end) for e in trace.events if e.category == "user_annotation" and e.name == DATA)
    found = []
    for step, window in sorted(trace.steps.items()):
        computing, communicating = clip(compute, window), clip(communication, window)
        exposed = subtract(communicating, computing)
        idle = subtract([window], union([*computing, *exposed]))
        parts = ([window], computing, communicating, exposed, idle, clip(data, window))
        found.append(StepTimes(step, *(length(part) / 1e6 for part in parts)))
    return found


def operators(trace: Trace) -> list[Work]:
    """Returns the GPU's kernels, copies and fills within the steps, longest total first.

    If the trace has no GPU work, returns the CPU's operators instead. The time of an operator then excludes the time of
    the operators that it calls.
    """
    on_device = trace.on_device
    windows = union(trace.steps.values())
    calls, seconds = Counter[str](), defaultdict[str, float](float)
    stacks = defaultdict[Any, list[Event]](list)  # the operators around an event, of each host thread
    for event in trace.events:
        waits = not on_device and is_communication(event, False)
        if not (waits or is_compute(event, on_device)) or event.name.startswith(NONBLOCKING):
            continue
        if not clip(windows, (event.start, event.end)):
            continue
        stack = [outer for outer in stacks[event.thread] if outer.end > event.start]
        if any(is_communication(outer, False) for outer in stack):
            continue  # gloo's internal copies and sums
        if not waits:
            calls[operator_name(event)] += 1
            seconds[operator_name(event)] += (event.end - event.start) / 1e6
        if not on_device:
            if stack:
                seconds[operator_name(stack[-1])] -= (min(event.end, stack[-1].end) - event.start) / 1e6
            stacks[event.thread] = [*stack, event]
    return _longest_first(Work(name, number, max(seconds[name], 0.0)) for name, number in calls.items())


def operator_name(event: Event) -> str:
    """Returns the name of an operator. A graph of compiled code gets a short name."""
    if event.name.startswith(COMPILED_GRAPH):
        return f"compiled graph {event.name.removeprefix(COMPILED_GRAPH)[:8]}"
    return event.name.partition(":")[0] if event.name.startswith(COMPILED) else event.name


def collectives(trace: Trace) -> list[Work]:
    """Returns the collectives of the backends (gloo, NCCL) within the steps, longest total first.

    Gloo implements reduce-scatter by all-reduce, so the trace contains an all-reduce in its place.
    """
    on_device, compute = trace.on_device, compute_times(trace)
    windows = union(trace.steps.values())
    found: dict[str, list[Event]] = defaultdict(list)
    for event in trace.events:
        if event.category not in ("user_annotation", "kernel") or not is_communication(event, on_device):
            continue
        if clip(windows, (event.start, event.end)):
            nccl = event.args.get("Collective name")
            name = event.name if event.category != "kernel" else f"nccl:{nccl}" if nccl else event.name.split("(")[0]
            found[name].append(event)
    table = []
    for name, events in found.items():
        times = union((e.start, e.end) for e in events)
        sizes = [input_bytes(event) for event in events]
        known = [size for size in sizes if size is not None]
        total = sum(known) if len(known) == len(sizes) else None
        table.append(Work(name, len(events), length(times) / 1e6, total, length(subtract(times, compute)) / 1e6))
    return _longest_first(table)


def _longest_first(works: Iterable[Work]) -> list[Work]:
    return sorted(works, key=lambda work: (-work.seconds, work.name))


def input_bytes(event: Event) -> int | None:
    """Returns the size of a collective's input on this rank; None if the trace does not contain the size."""
    args = event.args
    if "In msg nelems" in args:  # NCCL
        item = ITEM_BYTES.get(str(args.get("dtype")).lower())
        return None if item is None else int(args["In msg nelems"]) * item
    if event.name == "gloo:barrier":
        return 0
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not dims or not types:
        return None
    total = 0
    for shape, type_ in zip(dims, types, strict=False):
        item = ITEM_BYTES.get(str(type_).lower().removeprefix("c10::"))
        if item is None or not all(isinstance(size, int) for size in shape):
            return None
        total += math.prod(shape) * item
    return total

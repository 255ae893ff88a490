"""What a profiler's Chrome trace says of a rank's steps: computing, communication, what of it is exposed, and idleness.

On a GPU, computing is its kernels, copies and fills on any stream, and communication NCCL's kernels (and gloo's work,
if there is some). On a CPU, computing is a torch operator's on any thread of the process that is no collective and none
of gloo's own, and compiled code's; communication is gloo's work on its threads, the calls of collectives, and waiting
for them by `wait_tensor`. On both, what is exposed is communication during which nothing is computed by this rank; and
the rest of a step, in which neither goes on, is idle (Python, waiting for data). Communication includes waiting for a
rank that comes late.
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

STEP = "weft: step "  # the range of a whole step, with its number; whoever records a trace for this module opens it
DATA = "weft: data"  # within it: waiting for the batch

Interval = tuple[float, float]

COLLECTIVE_CALLS = ("c10d::", "_c10d_functional")
NO_COMPUTING = (*COLLECTIVE_CALLS, "autograd::", "torch::autograd::", "profiler::")
COMPILED = ("Torch-Compiled Region", "CompiledFunction")
COMPILED_GRAPH = "## Call CompiledFxGraph "
# gloo's sends and receives are ranges on the thread that asked for them, which computes meanwhile; all else that gloo
# does is on threads of its own.
UNBLOCKED = ("gloo:send", "gloo:recv")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
ITEM_BYTES = {
    **dict.fromkeys(("double", "long", "long int"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "short int"), 2),
    **dict.fromkeys(("unsigned char", "signed char", "char", "byte", "bool"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 1),
}


class Event(NamedTuple):
    """A stretch of time on one thread of the host or one stream of the device; in microseconds."""

    name: str
    category: str
    start: float
    end: float
    thread: Any
    args: dict[str, Any]


class MemoryEvent(NamedTuple):
    """Memory taken (`bytes` > 0) or given back at one moment, in microseconds, on a device ((0, -1) is the CPU)."""

    time: float
    address: int
    bytes: int
    total: int
    device: tuple[int, int]


@dataclass(frozen=True)
class Trace:
    """A trace, sorted by time."""

    events: list[Event]
    memory: list[MemoryEvent]

    @property
    def on_device(self) -> bool:
        """Whether a GPU worked."""
        return any(event.category in DEVICE_WORK for event in self.events)

    @property
    def steps(self) -> dict[int, Interval]:
        """The steps' numbers and their time."""
        ranges = (e for e in self.events if e.category == "user_annotation" and e.name.startswith(STEP))
        return {int(e.name.removeprefix(STEP)): (e.start, e.end) for e in ranges}


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step; compute + exposed + idle is all of it. `data` (waiting for the batch) is part of these."""

    step: int
    seconds: float
    compute: float
    communication: float
    exposed: float
    idle: float
    data: float


@dataclass(frozen=True)
class Work:
    """What one kind of operator, kernel or collective did in all steps of one rank.

    Attributes:
        seconds: of operators on a CPU without those that they called.
        bytes: of collectives, what this rank gave to them; None if it is not known.
        exposed: of collectives, the seconds during which nothing was computed.
    """

    name: str
    calls: int
    seconds: float
    bytes: int | None = None
    exposed: float | None = None


# --- Arithmetic of intervals. Unions are sorted and do not touch. ---


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same stretches of time, sorted, those that overlap or touch made one; empty ones are left out."""
    whole: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if whole and start <= whole[-1][1]:
            if end > whole[-1][1]:
                whole[-1] = (whole[-1][0], end)
        else:
            whole.append((start, end))
    return whole


def subtract(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """What of `one` is not in `other`; both are unions."""
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
    """What of a union is within `window`."""
    return [(max(a, window[0]), min(b, window[1])) for a, b in one if b > window[0] and a < window[1]]


def length(one: Iterable[Interval]) -> float:
    """The time that a union covers."""
    return math.fsum(end - start for start, end in one)


# --- Reading. ---


def read_trace(path: str | Path) -> Trace:
    """The trace that `torch.profiler` exported, plain or gzipped."""
    raw = Path(path).read_bytes()
    return parse(orjson.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)["traceEvents"])


def parse(entries: Iterable[dict[str, Any]]) -> Trace:
    """Chrome's trace events as `Trace`; those of no interest here are left out."""
    events, memory = [], []
    for entry in entries:
        thread = (entry.get("pid"), entry.get("tid"))
        if entry.get("ph") == "X":
            start = float(entry["ts"])
            end = start + float(entry.get("dur", 0))
            args = entry.get("args") or {}
            events.append(Event(entry["name"], entry.get("cat", ""), start, end, thread, args))
        elif entry.get("name") == "[memory]":
            args = entry["args"]
            device = (args["Device Type"], args["Device Id"])
            total = args.get("Total Allocated", 0)
            memory.append(MemoryEvent(float(entry["ts"]), args["Addr"], args["Bytes"], total, device))
    events.sort(key=lambda event: (event.start, -event.end))
    memory.sort(key=lambda event: event.time)
    return Trace(events, memory)


# --- What an event is. ---


def is_communication(event: Event, on_device: bool) -> bool:
    """Whether data go to other ranks, or this one waits for theirs."""
    if event.category == "user_annotation":
        return event.name.startswith("gloo:")
    if on_device:
        return event.category == "kernel" and "nccl" in event.name.lower()
    return event.category == "cpu_op" and event.name.startswith(COLLECTIVE_CALLS)


def is_compute(event: Event, on_device: bool) -> bool:
    """Whether something is computed (or copied within the machine)."""
    if on_device:
        return event.category in DEVICE_WORK and not is_communication(event, True)
    if event.category == "user_annotation":
        return event.name.startswith(COMPILED_GRAPH)
    if event.category != "cpu_op" or event.name.startswith(NO_COMPUTING):
        return False
    # A name without a namespace is that of a node of autograd, around its operators and whatever its hooks wait for.
    return "::" in event.name or event.name.startswith(COMPILED)


def computing(trace: Trace, on_device: bool) -> list[Interval]:
    """When this rank computes."""
    if on_device:
        return union((e.start, e.end) for e in trace.events if is_compute(e, True))
    work, waits = defaultdict(list), defaultdict(list)
    for event in trace.events:
        if is_compute(event, False):
            work[event.thread].append((event.start, event.end))
        elif is_communication(event, False) and not event.name.startswith(UNBLOCKED):
            waits[event.thread].append((event.start, event.end))
    # What a collective copies or adds on its own thread is communication, and so is a wait within compiled code.
    return union(part for thread in work for part in subtract(union(work[thread]), union(waits[thread])))


def communicating(trace: Trace, on_device: bool) -> list[Interval]:
    """When this rank's collectives are on their way."""
    return union((e.start, e.end) for e in trace.events if is_communication(e, on_device))


# --- What is reported. ---


def step_times(trace: Trace) -> list[StepTimes]:
    """The seconds of each step."""
    on_device = trace.on_device
    compute, communication = computing(trace, on_device), communicating(trace, on_device)
    data = union((e.start, e.end) for e in trace.events if e.category == "user_annotation" and e.name == DATA)
    found = []
    for step, window in sorted(trace.steps.items()):
        here, there = clip(compute, window), clip(communication, window)
        exposed = subtract(there, here)
        found.append(
            StepTimes(
                step=step,
                seconds=(window[1] - window[0]) / 1e6,
                compute=length(here) / 1e6,
                communication=length(there) / 1e6,
                exposed=length(exposed) / 1e6,
                idle=length(subtract([window], union([*here, *exposed]))) / 1e6,
                data=length(clip(data, window)) / 1e6,
            )
        )
    return found


def operators(trace: Trace) -> list[Work]:
    """Kernels by name, or on a CPU operators by their own time, within the steps; the longest first."""
    on_device = trace.on_device
    windows = union(trace.steps.values())
    calls, seconds = Counter[str](), defaultdict[str, float](float)
    stacks = defaultdict[Any, list[Event]](list)  # of each thread of the host: the operators that an event is within
    for event in trace.events:
        waits = not on_device and is_communication(event, False)
        if not (waits or is_compute(event, on_device)) or event.name.startswith(UNBLOCKED):
            continue
        if not clip(windows, (event.start, event.end)):
            continue
        stack = [outer for outer in stacks[event.thread] if outer.end > event.start]
        if any(is_communication(outer, False) for outer in stack):
            continue  # gloo's own copies and sums
        if not waits:
            calls[operator_name(event)] += 1
            seconds[operator_name(event)] += (event.end - event.start) / 1e6
        if not on_device:
            if stack:
                seconds[operator_name(stack[-1])] -= (min(event.end, stack[-1].end) - event.start) / 1e6
            stacks[event.thread] = [*stack, event]
    found = [Work(name, number, max(seconds[name], 0.0)) for name, number in calls.items()]
    return sorted(found, key=lambda work: (-work.seconds, work.name))


def operator_name(event: Event) -> str:
    """An operator's name; of compiled code, that of its graph, shortened."""
    if event.name.startswith(COMPILED_GRAPH):
        return f"compiled graph {event.name.removeprefix(COMPILED_GRAPH)[:8]}"
    return event.name.partition(":")[0] if event.name.startswith(COMPILED) else event.name


def collectives(trace: Trace) -> list[Work]:
    """What the backends (gloo, NCCL) did within the steps, by name; the longest first.

    gloo makes a reduce-scatter out of an all-reduce, and it is told as that: so it goes over the wire.
    """
    on_device = trace.on_device
    compute, windows = computing(trace, on_device), union(trace.steps.values())
    found: dict[str, list[Event]] = defaultdict(list)
    for event in trace.events:
        if event.category in ("user_annotation", "kernel") and is_communication(event, on_device):
            if not clip(windows, (event.start, event.end)):
                continue
            said = event.args.get("Collective name")
            name = event.name if event.category != "kernel" else f"nccl:{said}" if said else event.name.split("(")[0]
            found[name].append(event)
    table = []
    for name, events in found.items():
        times = union((e.start, e.end) for e in events)
        sizes = [given_bytes(event) for event in events]
        known = [size for size in sizes if size is not None]
        amount = sum(known) if len(known) == len(sizes) else None
        table.append(Work(name, len(events), length(times) / 1e6, amount, length(subtract(times, compute)) / 1e6))
    return sorted(table, key=lambda work: (-work.seconds, work.name))


def given_bytes(event: Event) -> int | None:
    """What a rank gives to a collective; None if the trace does not say."""
    args = event.args
    if "In msg nelems" in args:  # NCCL
        item = ITEM_BYTES.get(str(args.get("dtype")).lower())
        return None if item is None else int(args["In msg nelems"]) * item
    if event.name == "gloo:barrier":
        return 0
    total = 0
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not dims or not types:
        return None
    for shape, type_ in zip(dims, types, strict=False):
        item = ITEM_BYTES.get(str(type_).lower().removeprefix("c10::"))
        if item is None or not all(isinstance(size, int) for size in shape):
            return None
        total += math.prod(shape) * item
    return total

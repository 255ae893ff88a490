"""Measures the part of a step in which a rank does not wait for others, and names ranks for which it is long."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence

import torch

LEAST = 0.01  # seconds by which a slow rank exceeds the others, per step: less is noise
PROBE = 4096  # rows and columns of the matrices of `device_seconds`


class OwnTime:
    """Times the parts of a step in which a rank works for itself.

    Before the first collective of a step and after its last one, all time counts. In between, on CPUs, only the time
    counts in which the thread runs or waits for a core: a rank that waits for others sleeps. On GPUs, the thread cannot
    know whether the device waits, so `device_seconds` compares the devices.
    """

    def __init__(self, device: torch.device):
        self.on_cpu = device.type == "cpu"
        self.seconds = 0.0
        self._mark = self._ran = 0.0
        self._schedule: int | None = None
        with contextlib.suppress(OSError):  # not Linux
            self._schedule = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)

    def close(self) -> None:
        """Closes the file of the kernel that is read. Can be called twice."""
        if self._schedule is not None:
            os.close(self._schedule)
            self._schedule = None

    def arrive(self, began: float) -> None:
        """The rank arrives at the first collective of a step, which began at `began` (`time.perf_counter`)."""
        self.seconds += time.perf_counter() - began

    def depart(self) -> None:
        """The first collective of a step is complete."""
        self._ran = self._running() if self.on_cpu else 0.0

    def reduced(self) -> None:
        """The gradients are reduced and clipped: no collective follows before the update."""
        if self.on_cpu:
            self.seconds += self._running() - self._ran
        self._mark = time.perf_counter()

    def updated(self) -> None:
        """The weights are updated."""
        self.seconds += time.perf_counter() - self._mark

    def _running(self) -> float:
        """Returns the seconds in which this thread has run, or was ready to run."""
        if self._schedule is None:
            return time.thread_time()
        ran, waited, _ = os.pread(self._schedule, 128, 0).split()
        return (int(ran) + int(waited)) * 1e-9


def device_seconds(device: torch.device, size: int = PROBE) -> float:
    """Returns the shortest of three times of a matrix product on a GPU, in seconds."""
    a, times = torch.ones(size, size, device=device, dtype=torch.bfloat16), []
    for _ in range(4):  # the first one may load the kernel
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        torch.mm(a, a)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def slow_ranks(
    seconds: Sequence[float], groups: Sequence[int], factor: float, least: float
) -> dict[int, tuple[float, float]]:
    """Returns the ranks that need much longer than the other ranks of their group.

    Args:
        seconds: the time of each rank.
        groups: the group of each rank; ranks of different groups have different work (pipeline stages).
        factor: a slow rank needs more than this factor of the median of the others,
        least: and at least this number of seconds more.

    Returns:
        Rank -> (its time, median of the others).
    """
    members: dict[int, list[int]] = {}  # group -> its ranks, the fastest first
    for rank in sorted(range(len(seconds)), key=seconds.__getitem__):
        members.setdefault(groups[rank], []).append(rank)
    found = {}
    for ranks in members.values():
        low, high = (len(ranks) - 2) // 2, (len(ranks) - 1) // 2  # the middle of the others
        for place, rank in enumerate(ranks if len(ranks) > 1 else ()):
            middle = ranks[low + (low >= place)], ranks[high + (high >= place)]
            own, usual = seconds[rank], sum(seconds[one] for one in middle) / 2
            if own > factor * usual and own - usual > least:
                found[rank] = (own, usual)
    return found

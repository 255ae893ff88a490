"""Defines `Monitor`, which observes times, memory and disk of a run, and reports them."""

from __future__ import annotations

import logging
import math
import shutil
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from weft.checkpoint.checkpoint_files import total_bytes
from weft.checkpoint.load import checkpoints
from weft.errors import UserError
from weft.formatting import byte_size, timing
from weft.observe.manifest import local_time
from weft.parallel.memory.free import free_memory
from weft.parallel.ranks import all_gather_object
from weft.processes import available_memory
from weft.train.rollouts.source import RolloutSource
from weft.train.watch.alerts import Alerts
from weft.train.watch.endpoint import Endpoint
from weft.train.watch.growth import Growth
from weft.train.watch.heartbeat import Heartbeat
from weft.train.watch.own_time import LEAST, OwnTime, device_seconds, slow_ranks
from weft.train.watch.reports import record

if TYPE_CHECKING:
    from weft.train.loop import Loop

# What each rank sends every `watch.every` steps: seconds per step, of which it waited for data, and worked for itself;
# seconds of a matrix product on its GPU; bytes of its process and of its GPU, used and free.
SENT = 8
STALL = 0.005  # seconds per step: a shorter wait for data is no stall
log = logging.getLogger("weft.train")


class Monitor:
    """Observes a training loop. What it finds is a warning and an event on the first rank, and changes nothing.

    Every `watch.every` steps, all ranks send their times and memory in the all-reduce that begins a step. A time is
    reported if it is unusual in two such comparisons in a row, once, until it is as usual again.
    """

    def __init__(self, loop: Loop):
        self.loop, self.section, self.world = loop, loop.config.watch, loop.world
        self.recorder = loop.recorder
        self.events: Counter[str] = Counter()
        self.own = OwnTime(self.world.device)
        self.hosts, self.stages = [""], [0]  # of each rank
        # The model generates such batches, which takes as long as it takes, and all ranks do it together.
        self._judges_times = not isinstance(loop.data.source, RolloutSource)
        self._suspects: Counter[tuple[str, int]] = Counter()  # (kind, rank) -> comparisons in a row
        self._growth: dict[tuple[str, int], Growth] = defaultdict(Growth)
        self._reported_disks: set[str] = set()
        self._step_time: float | None = None
        self._seconds = self._data = 0.0  # since the last comparison
        self._steps = 0
        self._cleanup = ExitStack()
        self._cleanup.callback(self.own.close)
        self.recorder.closed_at_end.append(self)

    def begin(self, step: int) -> None:
        """Starts the threads of the first rank, and checks the disk. Every rank must call it.

        Raises:
            UserError: an alert or the endpoint for Prometheus cannot be set up.
        """
        places = all_gather_object((socket.gethostname(), self.world.axis_rank("pp")))
        self.hosts, self.stages = [host for host, _ in places], [stage for _, stage in places]
        self.world.agree(self._start)
        self.before_save(None)

    def _start(self) -> None:
        if self.world.rank:
            return
        section, run = self.section, self.loop.job.run.path
        if section.alert is not None:
            alerts = Alerts(section.alert, self.recorder.console.warning)
            self._cleanup.callback(alerts.close)
            self.recorder.listeners.append(alerts.send)
        self.recorder.listeners.append(lambda event: self.events.update([event["event"]]))
        if section.prometheus_port is not None:
            endpoint = Endpoint(section.prometheus_port, lambda: self.loop.state.metrics, self.events)
            self._cleanup.callback(endpoint.close)
        if section.heartbeat is not None:
            self._cleanup.callback(Heartbeat(run, section.heartbeat, self._beat).close)

    def close(self) -> None:
        """Stops the threads. Waits for alerts, at most for their time-out. Can be called twice."""
        self._cleanup.close()

    def _beat(self) -> dict[str, Any]:
        state = self.loop.state
        loss = state.loss if state.loss is not None and math.isfinite(state.loss) else None
        ended = None if self._step_time is None else local_time(self._step_time)
        return {"step": state.step, "loss": loss, "step_time": ended, "status": state.status}

    # ---- called in each step

    def votes(self, step: int) -> list[float]:
        """Returns what this rank sends in the all-reduce that begins the step after `step` updates; mostly nothing."""
        self.own.arrive(self.recorder.clock.began)
        if not self._steps or step % self.section.every:
            return []
        sent, at = [0.0] * (SENT * self.world.ranks), SENT * self.world.rank
        sent[at : at + SENT] = self._measure()
        return sent

    def decide(self, sums: Sequence[float], step: int) -> None:
        """Judges what the ranks sent, if they sent anything."""
        self.own.depart()
        if sums and self.world.rank == 0:
            ranks = [sums[at : at + SENT] for at in range(0, len(sums), SENT)]
            if self._judges_times:
                self._judge_times(step, ranks)
            if self.section.memory_growth:
                self._judge_memory(step, ranks)

    def ended(self) -> None:
        """Called at the end of a step."""
        clock = self.recorder.clock
        self._step_time = time.time()
        self._seconds += clock.step_seconds
        self._data += clock.waited_seconds
        self._steps += 1

    def _measure(self) -> list[float]:
        """Returns what this rank sends: times per step since the last comparison, and its memory now."""
        device, steps = self.world.device, self._steps
        on_gpu = device.type == "cuda"
        times = [one / steps for one in (self._seconds, self._data, self.own.seconds)]
        self._seconds = self._data = self.own.seconds = 0.0
        self._steps = 0
        probes = on_gpu and self.section.slow_rank is not None and self.world.ranks > 1
        memory = [float(psutil.Process().memory_info().rss), float(available_memory()), 0.0, 0.0]
        if on_gpu:
            memory[2:] = torch.cuda.memory_allocated(device), free_memory(device)
        return [*times, device_seconds(device) if probes else 0.0, *memory]

    # ---- called where a checkpoint is saved

    def before_save(self, folder: Path | None = None) -> None:
        """Warns if a disk has room for fewer than two checkpoints.

        Args:
            folder: the folder of the disk. Default: the run directory.
        """
        if self.world.rank or not self.section.disk:
            return
        run = self.loop.job.run.path
        folder, saved = folder or run, checkpoints(run)
        size = total_bytes(saved[-1]) if saved else self._first_size()
        free = shutil.disk_usage(folder).free
        if free >= 2 * size:
            self._reported_disks.discard(str(folder))
        elif str(folder) not in self._reported_disks:
            self._reported_disks.add(str(folder))
            self._report(
                "disk",
                f"{folder}: {byte_size(free)} are free, too little for two checkpoints of {'' if saved else 'about '}"
                f"{byte_size(size)}; free space, or lower checkpoint.keep_last",
                free_bytes=free,
                checkpoint_bytes=size,
            )

    def _first_size(self) -> int:
        """Estimates the bytes of the first checkpoint of a run: weights, and two moments of each trained weight."""
        config, recorder = self.loop.config, self.recorder
        weights = recorder.trained if config.adapter is not None else recorder.parameters
        return (weights + 2 * recorder.trained) * (8 if config.training.dtype == "float64" else 4)

    # ---- judgements of the first rank

    def _judge_times(self, step: int, ranks: Sequence[Sequence[float]]) -> None:
        section, seconds = self.section, [times[0] for times in ranks]
        if section.slow_rank is not None:
            own, probes = [times[2] for times in ranks], [times[3] for times in ranks]
            slow = slow_ranks(own, self.stages, section.slow_rank, max(LEAST, 0.05 * max(seconds)))
            slow_devices = slow_ranks(probes, [0] * len(ranks), section.slow_rank, 0.0)
            work = (
                "the other ranks wait for rank {rank} on {host}: it works {mine} per step, they {usual}; look at its "
                "host, its data and its callbacks"
            )
            device = (
                "the GPU of rank {rank} on {host} computes a matrix product in {mine}, the others in {usual}; look at "
                "its clocks and temperature"
            )
            for rank, host in enumerate(self.hosts):
                for kind, found, text in (("slow-rank", slow, work), ("slow-device", slow_devices, device)):
                    if self._is_lasting(kind, rank, rank in found):
                        mine, usual = found[rank]
                        what = text.format(rank=rank, host=host, mine=timing(mine), usual=timing(usual))
                        self._report(
                            "slow-rank", f"step {step:,}: {what}", rank=rank, host=host, seconds=mine, others=usual
                        )
        if section.data_stall is not None:
            for rank, (total, waited, *_) in enumerate(ranks):
                stalls = waited > section.data_stall * total and waited > STALL
                if self._is_lasting("data-stall", rank, stalls):
                    self._report(
                        "data-stall",
                        f"step {step:,}: rank {rank} on {self.hosts[rank]} waits for batches {waited / total:.0%} of "
                        f"the time ({timing(waited)} per step); raise data.workers, or read from a faster disk",
                        rank=rank,
                        host=self.hosts[rank],
                        share=waited / total,
                    )

    def _judge_memory(self, step: int, ranks: Sequence[Sequence[float]]) -> None:
        left = math.inf if self.loop.length.steps is None else self.loop.length.steps - step
        local = Counter(self.hosts)
        for rank, numbers in enumerate(ranks):
            for kind, used, free, sharing in (
                ("process", numbers[4], numbers[5], local[self.hosts[rank]]),
                ("GPU", numbers[6], numbers[7], 1),
            ):
                growth = self._growth[kind, rank].add(step, used, free / sharing, left)
                if self._is_lasting(f"memory of the {kind}", rank, growth is not None):
                    assert growth is not None
                    self._report(
                        "memory-growth",
                        f"step {step:,}: the memory of the {kind} of rank {rank} on {self.hosts[rank]} grows by "
                        f"{byte_size(growth)} per step, and {byte_size(free)} are free, which does not last until the "
                        "end of the run; look for tensors that custom code keeps",
                        rank=rank,
                        host=self.hosts[rank],
                        bytes_per_step=growth,
                        free_bytes=free,
                    )

    def _is_lasting(self, kind: str, rank: int, unusual: bool) -> bool:
        """Returns whether something is unusual for the second time in a row."""
        self._suspects[kind, rank] = self._suspects[kind, rank] + 1 if unusual else 0
        return self._suspects[kind, rank] == 2

    def _report(self, kind: str, text: str, **values: Any) -> None:
        """Prints a warning and records an event, on the first rank."""
        self.recorder.console.warning(text)
        try:
            record(self.recorder, self.loop.state.step, kind, "warn", text, **values)
        except UserError as error:  # other ranks do not know of it; the next checkpoint reports a full disk
            log.warning("%s", error)


class NoMonitor(Monitor):
    """Observes nothing, for a profile or a repetition of steps."""

    def begin(self, step: int) -> None:
        """Starts nothing."""

    def votes(self, step: int) -> list[float]:
        """Sends nothing."""
        return []

    def ended(self) -> None:
        """Counts nothing."""

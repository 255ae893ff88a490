"""Predicts the time of a training step by simulating its events.

One rank of each pipeline stage is simulated, with a stream for its computation and one for each axis that communicates
beside it (`weft.planner.timeline`). FSDP2 all-gathers the parameters of the next unit while a unit computes, and
reduces the gradients of the unit before. Pipeline ranks follow the orders of PyTorch's schedules, so bubbles are
measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from weft.config.run import RunConfig
from weft.observe.flop_count import flops_per_token
from weft.parallel.stages import stages_of_rank
from weft.planner.fsdp_passes import FsdpPasses
from weft.planner.hardware import Hardware
from weft.planner.pipeline import simulate_pipeline
from weft.planner.reduction import with_reduction
from weft.planner.timeline import Event, Parts, Timeline
from weft.planner.units import Job, Stage
from weft.planner.work import Stack

FEW = 4  # micro-batches that are simulated without a pipeline; further ones repeat the last
# Bytes of an optimizer's state, parameters and gradients that an update reads and writes, in elements per parameter.
UPDATE_ELEMENTS = 7  # AdamW: reads and writes the parameter and two moments, reads the gradient
CLIP_ELEMENTS = 3  # reads the gradient for its norm; reads and writes it to clip it
MUON_FLOPS = 30  # FLOPs per parameter and row of a matrix: five Newton-Schulz iterations (Jordan et al., 2024)


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a training step.

    Attributes:
        step_seconds: seconds of an optimizer step.
        tokens_per_second, samples_per_second: throughput of all devices; a sample is a sequence.
        mfu: model FLOP/s utilization, by the definition of `weft.observe.flops`.
        parts: seconds by cause; their sum is `step_seconds`. `compute`, `recompute`, `bubble`, `optimizer`, `input` and
            `stragglers`, and for each axis the time that computation waits for its communication or is slowed by it.
        timeline: function that returns `stages`.
    """

    step_seconds: float
    tokens_per_second: float
    samples_per_second: float
    mfu: float
    parts: dict[str, float]
    timeline: Callable[[], list[list[Event]]] = field(repr=False, compare=False)

    @cached_property
    def stages(self) -> list[list[Event]]:
        """For each pipeline rank, the events of its first micro-batches."""
        return self.timeline()


def predict(config: RunConfig, devices: int, hardware: Hardware, *, stack: Stack | None = None) -> Prediction:
    """Predicts the time of a training step.

    Args:
        config: a checked config. Its mesh must be legal for the number of devices.
        devices: number of ranks.
        hardware: the hardware file.
        stack: how the software that runs the step differs from Weft; default: it is Weft.

    Raises:
        UserError: the run cannot be predicted (see `Job`).
    """
    config = with_reduction(config, devices, hardware)
    job = Job(config, devices, hardware, stack)
    stages = job.stages()
    parts, events = _one_stage(job, stages[0]) if len(stages) == 1 else simulate_pipeline(job, stages)
    parts["optimizer"] += _update_seconds(job, stages)
    parts["input"] += 4 * 8 * job.micro * job.length * job.micro_batches / (hardware.host.to_device_gb_s * 1e9)
    nodes = -(-devices // hardware.node)
    step = sum(parts.values())
    parts["stragglers"] += hardware.jitter * math.sqrt(2 * math.log(nodes)) * step
    step = sum(parts.values())
    tokens = job.sequences * job.length / step
    size = job.model.size()
    flops = flops_per_token(size.matmul, job.model.all_layers, job.model.attention_width, job.length)
    return Prediction(
        step_seconds=step,
        tokens_per_second=tokens,
        samples_per_second=job.sequences / step,
        mfu=tokens * flops / (devices * job.costs.peak),
        parts={name: seconds for name, seconds in parts.items() if seconds > 0},
        timeline=events,
    )


def _update_seconds(job: Job, stages: list[Stage]) -> float:
    """Returns the seconds of clipping and of the optimizer's update on the rank with most parameters."""
    if not job.trained:
        return 0.0
    ranks = job.mesh.pp
    owned = [stages_of_rank(job.parallel, rank, ranks) for rank in range(ranks)] if ranks > 1 else [[0]]
    local = max(sum(stages[number].local for number in own) for own in owned)
    elements = UPDATE_ELEMENTS + (CLIP_ELEMENTS if job.training.grad_clip is not None else 0)
    size = local * elements * job.state
    if job.parallel.offload == "parameters":
        seconds = size * job.hardware.node / (job.hardware.host.to_device_gb_s * 1e9)  # the host's memory is shared
    else:
        seconds = job.costs.moved(size)
        if job.parallel.offload == "optimizer":
            seconds += 4 * local * job.state / (job.hardware.host.to_device_gb_s * 1e9)
    if job.config.optimizer.type == "muon":
        seconds += local * MUON_FLOPS * job.model.hidden_size / job.costs.rates[job.dtype]
    if job.training.grad_clip is not None:
        groups = ("fsdp", "dp_replicate", "tp", "pp")
        seconds += sum(job.links.seconds("all_reduce", 4, job.groups[axis]) for axis in groups)
    return seconds


def _one_stage(job: Job, stage: Stage) -> tuple[Parts, Callable[[], list[list[Event]]]]:
    """Returns the parts of a step without a pipeline, and a function that returns its events."""
    count = job.micro_batches
    few = _simulate(job, stage, min(count, FEW))
    parts = few.parts
    if count > FEW:
        before = _simulate(job, stage, FEW - 1).parts
        parts = parts.plus(parts, count - FEW).plus(before, FEW - count)
    return parts, lambda: [few.events]


def _simulate(job: Job, stage: Stage, count: int) -> Timeline:
    """Simulates all passes of `count` micro-batches, and waits for the gradients."""
    line = Timeline(job.hardware.overlap.slowdown)
    for number in range(count):
        fsdp = FsdpPasses(job, stage, line, first=number == 0, last=number == count - 1)
        fsdp.forward()
        fsdp.backward()
    line.drain()
    return line

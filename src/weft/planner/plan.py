"""A plan: a config on a number of devices, with its predicted time, memory and cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from weft.config.derive import batch_sequences, derive, sequence_length, split_batch
from weft.config.legal_mesh import SIZES
from weft.config.mesh import ParallelSection, mesh_shape
from weft.config.run import RunConfig
from weft.errors import UserError
from weft.planner.hardware import Hardware
from weft.planner.memory import Memory, memory_of
from weft.planner.reduction import with_reduction
from weft.planner.step import Prediction, predict
from weft.planner.units import compute_dtype


@dataclass(frozen=True)
class RunPlan:
    """A config on a number of devices, with its predicted time and memory.

    Attributes:
        config: the config with the keys of the plan.
        devices: number of ranks.
        hardware: the hardware file.
        prediction: the predicted step.
        ranks: memory of one rank of each pipeline rank.
    """

    config: RunConfig
    devices: int
    hardware: Hardware
    prediction: Prediction
    ranks: list[Memory]

    @cached_property
    def memory(self) -> Memory:
        """Memory of the rank that needs most."""
        return max(self.ranks, key=lambda one: one.total)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the rank that needs most memory."""
        return round(self.memory.total)

    @property
    def excess(self) -> float:
        """Bytes that exceed the device's memory; negative if the plan fits."""
        return self.memory.total - capacity(self.hardware)

    @cached_property
    def axes(self) -> dict[str, int]:
        """The sizes of all axes."""
        return mesh_shape(self.config.parallel, self.devices).sizes

    @property
    def parallel(self) -> dict[str, Any]:
        """The keys of the section `parallel`: the sizes of all axes, and keys that differ from their defaults."""
        section = self.config.parallel
        written = section.model_dump(mode="json")
        others = {
            name: written[name]
            for name, info in ParallelSection.model_fields.items()
            if name not in SIZES and written[name] != info.default
        }
        return {axis: self.axes[axis] for axis in SIZES} | others

    @property
    def training(self) -> dict[str, Any]:
        """The keys of the section `training` that a plan sets."""
        per_rank = {"micro_batch_size": self.micro_batch_size}
        return per_rank | {"activation_checkpointing": self.config.training.activation_checkpointing}

    @property
    def micro_batch_size(self) -> int:
        """Number of sequences of a micro-batch."""
        mesh, length = mesh_shape(self.config.parallel, self.devices), sequence_length(self.config)
        given = self.config.training.micro_batch_size
        return split_batch(batch_sequences(self.config), length, mesh, given, self.config.parallel)[1]

    @property
    def steps(self) -> int | None:
        """Number of steps of the run; None if it is not known."""
        try:
            return derive(self.config, mesh=mesh_shape(self.config.parallel, self.devices)).steps
        except UserError:
            return None

    def costs(self) -> dict[str, float]:
        """Returns days, GPU-hours, energy and price of the run; {} if its length is not known."""
        if self.steps is None:
            return {}
        hours = self.steps * self.prediction.step_seconds / 3600
        found = {"days": hours / 24, "gpu_hours": hours * self.devices}
        found["energy_mwh"] = found["gpu_hours"] * self.hardware.device.power_w / 1e6
        if self.hardware.price_per_hour is not None:
            found["price"] = found["gpu_hours"] * self.hardware.price_per_hour
        return found

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan as plain data, as `weft plan --json` prints it."""
        predicted = self.prediction
        return {
            "parallel": self.parallel,
            "training": self.training,
            "memory_bytes": self.memory_bytes,
            "memory": {name: round(size) for name, size in self.memory.parts().items()},
            "step_seconds": predicted.step_seconds,
            "tokens_per_second": predicted.tokens_per_second,
            "samples_per_second": predicted.samples_per_second,
            "mfu": predicted.mfu,
            "parts": dict(predicted.parts),
            "days": None,
            "gpu_hours": None,
            "energy_mwh": None,
            **self.costs(),
        }


@dataclass(frozen=True)
class RunPlans:
    """The result of a search.

    Attributes:
        best: the plans that fit, each the fastest of its mesh, from fast to slow.
        near: plans that would be faster than the best one, but do not fit, with the least excess first.
        predicted: number of plans that were predicted.
        considered: number of plans whose bounds were computed.
        exact: whether no other plan can be faster; otherwise some were skipped by estimates of their time.
    """

    best: list[RunPlan]
    near: list[RunPlan]
    predicted: int
    considered: int
    exact: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Returns the plans as plain data, as `weft plan --json` prints them."""
        near = [plan.as_dict() | {"excess_bytes": round(plan.excess)} for plan in self.near]
        return {
            "plans": [plan.as_dict() for plan in self.best],
            "runner_up": self.reason,
            "near_misses": near,
            "exact": self.exact,
        }

    @property
    def reason(self) -> str | None:
        """Why the second plan is slower than the first, by the parts of their steps; None if there is no second."""
        return why_slower(*self.best[:2]) if len(self.best) > 1 else None


def capacity(hardware: Hardware) -> float:
    """Returns the bytes of a device's memory."""
    return hardware.device.memory_gb * 1e9


def why_slower(first: RunPlan, second: RunPlan) -> str:
    """Returns the parts of a step that make the second plan slower than the first."""
    one, other = first.prediction, second.prediction
    names = {*one.parts, *other.parts}
    more = {name: other.parts.get(name, 0.0) - one.parts.get(name, 0.0) for name in names}
    worst = sorted(((seconds, name) for name, seconds in more.items() if seconds > 0), reverse=True)[:2]
    slower = other.step_seconds / one.step_seconds - 1
    parts = " and ".join(f"{seconds:.3g} s more {part_name(name)}" for seconds, name in worst)
    return f"{slower:.1%} slower: {parts}" if slower > 5e-4 and parts else "as fast"


def part_name(name: str) -> str:
    """Returns the name of a part of a step for people."""
    return name if name in OWN_PARTS else f"waiting for {name}"


OWN_PARTS = ("compute", "recompute", "bubble", "optimizer", "input", "stragglers")


def plan_dtype(plan: RunPlan) -> str:
    """Returns the dtype in which a plan computes, on the device of its hardware file."""
    return compute_dtype(plan.config.training.dtype, plan.hardware)


def memory_on(config: RunConfig, devices: int, hardware: Hardware, *, only: int | None = None) -> list[Memory]:
    """Returns the memory of a rank of each pipeline rank (see `memory_of`) on a device of a hardware file."""
    dtype = compute_dtype(config.training.dtype, hardware)
    config = with_reduction(config, devices, hardware)
    return memory_of(config, devices, dtype=dtype, cpu=hardware.device.kind == "cpu", only=only)


def needed_bytes(config: RunConfig, devices: int, hardware: Hardware) -> float:
    """Returns the bytes of the rank that needs most memory (see `memory_on`)."""
    return max(one.total for one in memory_on(config, devices, hardware))


def plan_of(config: RunConfig, devices: int, hardware: Hardware) -> RunPlan:
    """Returns a config with its own mesh as a plan.

    Raises:
        UserError: the run cannot be predicted, or its mesh is not legal.
    """
    config = with_reduction(config, devices, hardware)
    ranks = memory_on(config, devices, hardware)
    return RunPlan(config, devices, hardware, predict(config, devices, hardware), ranks)

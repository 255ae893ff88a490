"""Errors of a search that finds no plan: what is short, and what would help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from weft.config.derive import batch_sequences, sequence_length
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.errors import UserError
from weft.formatting import byte_size, counted
from weft.planner.candidates import MeshSpace
from weft.planner.hardware import Hardware, hardware_names, load_hardware
from weft.planner.memory import STATES, memory_of
from weft.planner.plan import RunPlan, capacity, needed_bytes

ADAPTER = "an adapter in place of all weights (adapter: {r: 16})"


class NoPlan(UserError):
    """No plan fits a number of devices.

    Attributes:
        ends: whether there is no plan for more devices either.
    """

    ends = False


class TooManyDevices(NoPlan):
    """More devices than layers, heads and batch allow."""

    ends = True


def too_many_devices(config: RunConfig, devices: int, hardware: Hardware) -> TooManyDevices:
    """Returns the error for more devices than layers, heads and batch allow."""
    most = 1 << (devices - 1).bit_length() - 1  # powers of 2 are enough for a hint
    while most > 1 and not MeshSpace(config, most, hardware, within=False).possible():
        most //= 2
    sequences, length = batch_sequences(config), sequence_length(config)
    layers = getattr(config.model, "num_hidden_layers", None)
    return TooManyDevices(
        f"{counted(devices, 'device')}: no mesh gives each of them work: the global batch has "
        f"{counted(sequences, 'sequence')} (training.batch_tokens) and the model {layers} layers; use at most "
        f"{counted(most, 'device')}, or set training.batch_tokens to {devices * length} or more"
    )


def nothing_fits(nearest: Sequence[RunPlan], hardware: Hardware) -> NoPlan:
    """Returns the error for a search in which nothing fits, with remedies in the order of their cost.

    Args:
        nearest: the plans that need least memory; not empty.
    """
    plan = nearest[0]
    parts = sorted(plan.memory.parts().items(), key=lambda one: -one[1])[:3]
    largest = ", ".join(f"{name} {byte_size(size)}" for name, size in parts)
    where = f"{counted(plan.devices, 'device')} of {byte_size(capacity(hardware))} ({hardware.device.name})"
    fits_device = plan.excess <= 0
    if fits_device:
        what = f"needs more host memory for offloading than {hardware.host.memory_gb:g} GB"
    else:
        what = f"needs {byte_size(plan.memory.total)} per rank, {byte_size(plan.excess)} too much ({largest})"
    found = _host_remedies(plan, hardware) if fits_device else _remedies(plan, hardware)
    remedies = "; ".join(f"({number}) {text}" for number, text in enumerate(found, 1))
    return NoPlan(f"no plan fits {where}: the nearest, {describe(plan)}, {what}; remedies by cost: {remedies}")


def describe(plan: RunPlan) -> str:
    """Returns a plan in short: mesh, micro-batch, recomputation and offloading."""
    sizes = " x ".join(f"{axis} {size}" for axis, size in plan.axes.items() if size > 1) or "one rank"
    checkpointing, offload = plan.training["activation_checkpointing"], plan.config.parallel.offload
    text = f"{sizes} with micro_batch_size {plan.training['micro_batch_size']}, recomputation {checkpointing}"
    return text if offload == "none" else f"{text}, offload {offload}"


def _remedies(plan: RunPlan, hardware: Hardware) -> list[str]:
    """Returns at most five changes from cheap to expensive, with the memory that the nearest plan would then need."""
    config, length = plan.config, sequence_length(plan.config)

    def needs(**sections: dict[str, Any]) -> str:
        changes = {name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()}
        changed = config.model_copy(update=changes)
        return byte_size(needed_bytes(changed, plan.devices, hardware))

    found = []
    if config.training.reduce_dtype in ("auto", "float32"):
        found.append(f"training.reduce_dtype: bfloat16 ({needs(training={'reduce_dtype': 'bfloat16'})})")
    if length >= 256 and length % 2 == 0 and length // 2 % (2 * plan.axes["cp"] * plan.axes["tp"]) == 0:
        found.append(f"data.sequence_length: {length // 2} ({needs(data={'sequence_length': length // 2})})")
    found.append(_with_more_devices(plan, hardware))
    if (larger := _larger_device(plan, hardware)) is not None:
        found.append(larger)
    if config.adapter is None:
        found.append(ADAPTER)
    found.append("a smaller model")
    return found[:5]


def _host_remedies(plan: RunPlan, hardware: Hardware) -> list[str]:
    """Returns at most five changes for a plan that lacks memory of the host, from cheap to expensive."""
    model, states = plan.config.model, STATES.get(plan.config.optimizer.type, 2)
    assert isinstance(model, ModelSection)
    copies = states if plan.config.parallel.offload == "optimizer" else states + 2  # with parameters and gradients
    needed = 4 * copies * model.size().parameters
    hosts = max(2, math.ceil(needed / (hardware.host.memory_gb * 1e9)))
    devices = max(2 * plan.devices, hosts * hardware.node)
    found = [] if plan.config.adapter is not None else [ADAPTER]
    if states > STATES["muon"]:
        found.append("an optimizer with less state (optimizer: {type: muon})")
    found.append(f"hosts with more memory: in all, {byte_size(needed)} (host.memory_gb of the hardware file)")
    found.append(f"{counted(devices, 'device')} or more, on {math.ceil(devices / hardware.node)} hosts")
    found.append("a smaller model")
    return found


def _with_more_devices(plan: RunPlan, hardware: Hardware) -> str:
    devices = plan.devices
    for _ in range(10):
        devices *= 2
        sizes = {"dp_shard": plan.axes["dp_shard"] * devices // plan.devices}
        parallel = plan.config.parallel.model_copy(update=sizes)
        changed = plan.config.model_copy(update={"parallel": parallel})
        needed = needed_bytes(changed, devices, hardware)
        if needed <= capacity(hardware):
            return f"{counted(devices, 'device')} ({byte_size(needed)})"
    return f"{counted(2 * plan.devices, 'device')} and a shorter sequence"


@cache
def _devices() -> list[tuple[float, str]]:
    return sorted((load_hardware(name).device.memory_gb, name) for name in hardware_names() if name[:3] != "cpu")


def _larger_device(plan: RunPlan, hardware: Hardware) -> str | None:
    needed = max(one.total for one in memory_of(plan.config, plan.devices))
    larger = max(needed, capacity(hardware) + 1)
    name = next((name for memory, name in _devices() if memory * 1e9 >= larger), None)
    return None if name is None or hardware.device.kind == "cpu" else f"--hardware {name} or another larger device"

"""Describes the structure of a sharded model as text: modules, wrappers, and placements of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.config.mesh import mesh_shape
from weft.parallel.apply import assemble
from weft.parallel.axes.local_stages import Stages
from weft.parallel.local_parameters import local
from weft.parallel.memory.estimate import MemoryEstimate, estimate_memory
from weft.parallel.model_state import ModelPlan, ModelState, repeated_blocks, state_of
from weft.parallel.torchao import raise_unless_installed
from weft.parallel.world import World, meshes
from weft.torch_private import fake_ranks

T = TypeVar("T")


class FakeWorld(World):
    """The world of rank 0 in a fake process group, without communication."""

    def agree(self, act: Callable[[], T], only_first: bool = False) -> T:
        return act()


def structure(
    plan: ModelPlan,
    ranks: int,
    micro_batch_size: int | None = None,
    states: int = 2,
    frozen: Sequence[ModelPlan] = (),
) -> str:
    """Returns a text that shows the structure of rank 0's model on `ranks` ranks.

    With `micro_batch_size`, the text also contains an estimate of the memory of a training step (`estimate_memory`).
    `frozen` are the plans of the objective's frozen models (see `estimated_memory`).

    Builds the model on the meta device with a fake process group. A process group must not exist already.

    Raises:
        UserError: if the model cannot be built on this mesh, or fp8 is used and torchao is not installed.
    """
    with _assembled(plan, ranks) as (model, state):
        dtype, state_dtype = (str(each).removeprefix("torch.") for each in (plan.dtype, plan.state_dtype))
        shape = state.world.shape
        lines = [f"mesh: {shape}; rank 0 of {ranks}; compute in {dtype}, parameters in {state_dtype}"]
        for number, stage in (model.stages if isinstance(model, Stages) else {None: model}).items():
            lines += _stage(number, stage, state)
        if micro_batch_size is not None and plan.sequence:
            size = f"{micro_batch_size} x {plan.sequence:,} tokens"
            others = [model if other is plan else assemble(other, state.world) for other in frozen]
            sizes = {"micro_batch_size": micro_batch_size, "states": states}
            estimate = estimate_memory(model, plan, state.world, frozen=others, **sizes)
            lines += ["", f"memory of rank 0, estimated for micro-batches of {size}:", *estimate.lines()]
        return "\n".join(lines)


def estimated_memory(
    plan: ModelPlan, ranks: int, *, micro_batch_size: int, states: int = 2, frozen: Sequence[ModelPlan] = ()
) -> MemoryEstimate:
    """Estimates the memory of rank 0 on `ranks` ranks in a training step. Conditions and errors are as in `structure`.

    Args:
        micro_batch_size, states: as in `estimate_memory`.
        frozen: plans of the objective's frozen models; `plan` itself for a reference that shares the base model of the
            trained adapter.
    """
    with _assembled(plan, ranks) as (model, state):
        others = [model if other is plan else assemble(other, state.world) for other in frozen]
        sizes = {"micro_batch_size": micro_batch_size, "states": states}
        return estimate_memory(model, plan, state.world, frozen=others, **sizes)


@contextmanager
def _assembled(plan: ModelPlan, ranks: int) -> Iterator[tuple[nn.Module, ModelState]]:
    """Context with rank 0's model on the meta device, and its state, in a fake process group."""
    if plan.fp8:
        raise_unless_installed("training.fp8", "fp8")
    shape = mesh_shape(plan.parallel, ranks)
    with fake_ranks(ranks):
        world = FakeWorld(0, ranks, torch.device("meta"), shape, **meshes(shape, torch.device("cpu")))
        model = assemble(plan, world)
        state = state_of(model)
        assert state is not None
        yield model, state


def _stage(number: int | None, model: nn.Module, state: ModelState) -> Iterator[str]:
    """Yields lines of text that describe the structure of a full model or a pipeline stage.

    Blocks with the same structure are shown once.

    Args:
        number: index of the pipeline stage; None for a full model.

    """
    blocks = set(repeated_blocks(model))
    names = {name: module for name, module in model.named_modules() if module in blocks}
    equal: dict[tuple[str, ...], list[str]] = {}
    for name, block in names.items():
        equal.setdefault(tuple(_module(block, "", state, set())), []).append(name)
    yield ""
    yield f"{_class(model)}{'' if number is None else f', stage {number}'}"
    yield from _module(model, "", state, blocks)
    for lines, same in equal.items():
        shown = same if len(same) < 5 else [*same[:2], "...", same[-1]]
        yield ""
        yield f"{', '.join(shown)} ({len(same)}): {_class(names[same[0]])}"
        yield from lines


def _module(module: nn.Module, path: str, state: ModelState, left_out: set[nn.Module]) -> Iterator[str]:
    """Yields lines of text that describe a module and, recursively, its submodules.

    For each module, the lines show the wrappers of its forward (outermost first), the attributes that `ModelState.fill`
    assigned, and the parameters.

    Args:
        path: name of the module in the described model; "" for the model itself.
        left_out: submodules to skip, because `_stage` describes them separately.
    """
    lines = []
    if state.wrappers[module]:
        order = [*reversed(state.wrappers[module]), f"{_class(module)}.forward"]
        lines = ["forward:", *(f"{'  ' * depth}{label}" for depth, label in enumerate(order, start=1))]
    lines += [f"{attribute} <- {label}" for attribute, label in state.assigned[module].items()]
    lines += [f"{name} {_placements(value)}" for name, value in module.named_parameters(recurse=False)]
    if lines and path:
        yield f"  {path}: {_class(module)}"
    yield from (f"{'    ' if path else '  '}{line}" for line in lines)
    for name, child in module.named_children():
        if child not in left_out:
            yield from _module(child, f"{path}.{name}".lstrip("."), state, left_out)


def _placements(parameter: torch.Tensor) -> str:
    """Returns a parameter's shape and placements, such as `[512, 64]: dp_shard S(0); local [256, 64]`."""
    text = str(list(parameter.shape)) + ("" if parameter.requires_grad else " (frozen)")
    if not isinstance(parameter, DTensor):
        return text
    axes: Any = parameter.device_mesh.mesh_dim_names or ()
    placed = ", ".join(f"{axis} {placement}" for axis, placement in zip(axes, parameter.placements, strict=True))
    return f"{text}: {placed}; local {list(local(parameter).shape)}"


def _class(module: nn.Module) -> str:
    """Returns the name of a module's class, without FSDP2's prefix."""
    return type(module).__name__.removeprefix("FSDP")

"""A picture of what wraps what: the modules of a sharded model, their parameters' placements, and their wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.config.mesh import mesh_shape
from weft.errors import UserError
from weft.parallel.apply import assemble
from weft.parallel.axes.pipeline import Stages
from weft.parallel.local_parameters import local
from weft.parallel.model_state import ModelPlan, ModelState, repeated_blocks, state_of
from weft.parallel.world import World, meshes
from weft.torch_private import fake_ranks

T = TypeVar("T")


class FakeWorld(World):
    """Rank 0 of ranks that are not there."""

    def agree(self, act: Callable[[], T], only_first: bool = False) -> T:
        """Nobody else is there."""
        return act()


def structure(plan: ModelPlan, ranks: int) -> str:
    """The model that rank 0 of `ranks` would have: on the meta device, in this one process.

    Call it where no process group is open: it opens a fake one.

    Raises:
        UserError: as `build_sharded_model`.
    """
    if plan.fp8 and find_spec("torchao") is None:
        raise UserError("training.fp8: torchao is not installed; pip install 'weft-train[fp8]', or remove the key")
    shape = mesh_shape(plan.parallel, ranks)
    with fake_ranks(ranks):
        world = FakeWorld(0, ranks, torch.device("meta"), shape, **meshes(shape, torch.device("cpu")))
        model = assemble(plan, world)
        state = state_of(model)
        assert state is not None
        dtype, wide = (str(one).removeprefix("torch.") for one in (plan.dtype, plan.state_dtype))
        head = f"mesh: {shape}; rank 0 of {ranks}; computes in {dtype}, keeps {wide}"
        stages = model.stages if isinstance(model, Stages) else {None: model}
        return "\n".join([head, *(line for number, stage in stages.items() for line in _stage(number, stage, state))])


def _stage(number: int | None, model: nn.Module, state: ModelState) -> Iterator[str]:
    """A whole model, or a stage of a pipeline: blocks that look alike are shown once."""
    blocks = set(repeated_blocks(model))
    names = {name: module for name, module in model.named_modules() if module in blocks}
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, block in names.items():
        alike.setdefault(tuple(_module(block, "", state, set())), []).append(name)
    yield ""
    yield f"{_class(model)}{'' if number is None else f', stage {number}'}"
    yield from _module(model, "", state, blocks)
    for lines, same in alike.items():
        shown = same if len(same) < 5 else [*same[:2], "...", same[-1]]
        yield ""
        yield f"{', '.join(shown)} ({len(same)}): {_class(names[same[0]])}"
        yield from lines


def _module(module: nn.Module, path: str, state: ModelState, apart: set[nn.Module]) -> Iterator[str]:
    """A module's wrappers, outermost first, what fills its seams, its parameters; then its children's."""
    lines = []
    if state.wrappers[module]:
        order = [*reversed(state.wrappers[module]), f"{_class(module)}.forward"]
        lines = ["forward:", *(f"{'  ' * depth}{label}" for depth, label in enumerate(order, start=1))]
    lines += [f"{seam} <- {label}" for seam, label in state.seams[module].items()]
    lines += [f"{name} {_placed(value)}" for name, value in module.named_parameters(recurse=False)]
    if lines and path:
        yield f"  {path}: {_class(module)}"
    yield from (f"{'    ' if path else '  '}{line}" for line in lines)
    for name, child in module.named_children():
        if child not in apart:
            yield from _module(child, f"{path}.{name}".lstrip("."), state, apart)


def _placed(parameter: torch.Tensor) -> str:
    """`[512, 64]: dp_shard Shard(dim=0); here [256, 64]`."""
    text = str(list(parameter.shape)) + ("" if parameter.requires_grad else " (frozen)")
    if not isinstance(parameter, DTensor):
        return text
    axes: Any = parameter.device_mesh.mesh_dim_names or ()
    placed = ", ".join(f"{axis} {placement}" for axis, placement in zip(axes, parameter.placements, strict=True))
    return f"{text}: {placed}; here {list(local(parameter).shape)}"


def _class(module: nn.Module) -> str:
    """FSDP2 makes a class of its own of a module's."""
    return type(module).__name__.removeprefix("FSDP")

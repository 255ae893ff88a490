"""What ranks do in the tests of products in 8 bits."""

from functools import partial
from pathlib import Path

import torch
from pool import fit
from torch import nn
from wire import Wire

from weft.config.mesh import ParallelSection
from weft.parallel import fp8
from weft.parallel.axes.fsdp import shard_over_data
from weft.parallel.model_state import ModelPlan, ModelState
from weft.parallel.world import start_world
from weft.train import trainer


def fit_emulating(file: Path, fresh: bool) -> dict[str, int]:
    """Train with products that are rounded as in 8 bits, on a device that knows none.

    Returns:
        Process group -> bytes of its all-gathers.
    """
    real, examine = fp8.use_fp8, trainer.raise_unless_usable
    fp8.use_fp8, trainer.raise_unless_usable = partial(real, emulate=True), lambda device: None
    try:
        with Wire() as wire:
            fit(file, fresh)
        return {axis: size for (kind, axis), (_, size) in wire.totals("kind", "axis").items() if kind == "all_gather"}
    finally:
        fp8.use_fp8, trainer.raise_unless_usable = real, examine


class Sinks(nn.Module):
    """A layer with a parameter beside a linear layer, and a matrix that is not sharded by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 48, bias=False)
        self.sinks = nn.Parameter(torch.randn(16))
        self.wide = nn.Parameter(torch.randn(1, 64))
        self.seen: tuple[torch.Tensor, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.sinks.detach().clone(), self.wide.detach().clone(), self.proj.weight.detach().clone()
        return self.proj(x)


class Layered(nn.Module):
    """A model of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(Sinks())])
        self.head = nn.Linear(48, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](x))


def gathered() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[str]]:
    """What a rank of two computes with, what it should be, and the wrappers of the model and of its block."""
    torch.manual_seed(0)
    world = start_world(ParallelSection(dp_shard=2))
    built = Layered()
    whole = {name: value.detach().to(torch.bfloat16) for name, value in built.named_parameters()}
    fp8.use_fp8(built, list(built.layers), "rowwise", emulate=True)
    plan = ModelPlan(None, ParallelSection(dp_shard=2), dtype=torch.bfloat16, fp8="rowwise")
    state = ModelState(plan, world, lambda parameter: parameter)
    shard_over_data(built, state)
    built(torch.randn(32, 64, dtype=torch.bfloat16))
    names = ("sinks", "wide", "proj.weight")
    seen = dict(zip(names, built.layers[0][0].seen, strict=True))
    wrappers = [*state.wrappers[built], *state.wrappers[built.layers[0]]]
    return seen, {name: whole[f"layers.0.0.{name}"] for name in names}, wrappers

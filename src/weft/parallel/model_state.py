"""What `parallel/` knows of one model: its plan, its ranks, and what wraps its forwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.config.mesh import ParallelSection
from weft.config.model import CustomModelSection, ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.parallel.world import World

if TYPE_CHECKING:
    from weft.parallel.axes.context import SequenceShard

ATTRIBUTE = "weft_state"  # of the model: the only attribute that `parallel/` adds to a module


@dataclass(frozen=True)
class ModelPlan:
    """How to build and shard a model, independent of the mesh.

    Attributes:
        dtype: of compute. State is float32 (float64 for float64).
        reduce_dtype: of gradients in reductions over ranks; None: the dtype of the state.
        seed: initial weights are a function of it and of parameter names, not of the mesh.
        activation_checkpointing: `training.activation_checkpointing`.
        only_rows_from: freeze all parameters but the embedding and the head, whose rows below it `FrozenRows` keeps.
        sequence: tokens per sequence, for the cost of pipeline stages; 0: not known.
        fp8: multiply by the blocks' matrices in 8 bits.
    """

    model: ModelSection | TransformersModelSection | CustomModelSection
    parallel: ParallelSection
    dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None
    seed: int = 0
    compile: bool = False
    activation_checkpointing: str = "none"
    only_rows_from: int | None = None
    sequence: int = 0
    fp8: bool = False

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype of parameters, of the residual stream and, by default, of gradient reductions."""
        return torch.promote_types(self.dtype, torch.float32)


@dataclass
class ModelState:
    """The state of one sharded model, an attribute of its root module (`state_of`). Pipeline stages share it.

    Attributes:
        sequence_shard: the shard of each sequence that this rank of `cp` has; None without `cp`.
        scales: (module, parameter name) -> factor on a replicated parameter that every `tp` rank adds to a partial sum.
        local: returns the plain tensor that this rank computes with for a DTensor parameter.
        unsharded_units: FSDP2 units on a single rank, whose parameters are never freed.
        wrappers: module -> labels of what wraps its forward, innermost first.
        seams: module -> attribute -> label of what `parallel/` assigned to it.
    """

    plan: ModelPlan
    world: World
    local: Callable[[DTensor], torch.Tensor]
    sequence_shard: SequenceShard | None = None
    scales: dict[tuple[nn.Module, str], float] = field(default_factory=dict)
    unsharded_units: set[nn.Module] = field(default_factory=set)
    wrappers: defaultdict[nn.Module, list[str]] = field(default_factory=lambda: defaultdict(list))
    seams: defaultdict[nn.Module, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))

    def wrap(self, module: nn.Module, label: str, wrapper: Callable[[Callable], Callable]) -> None:
        """Replaces a module's forward by `wrapper(forward)`. No other code replaces a forward.

        The module itself stays, so parameter names do not change, and hooks (FSDP2's) run outside of the wrapper.
        """
        forward = module.forward
        wrapped = wrapper(forward)
        if wrapped is not forward:
            module.forward = wrapped
            self.wrappers[module].append(label)

    def fill(self, module: nn.Module, seam: str, label: str, value: object) -> None:
        """Assigns to an attribute that the model's code provides as a seam."""
        setattr(module, seam, value)
        self.seams[module][seam] = label


def state_of(model: nn.Module) -> ModelState | None:
    """The state of a model from `build_sharded_model`; None for any other."""
    return getattr(model, ATTRIBUTE, None)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost `nn.ModuleList`s: the units of checkpointing, compilation and sharding."""
    found: list[nn.Module] = []
    for child in model.children():
        inner = child if isinstance(child, nn.ModuleList) else repeated_blocks(child)
        found += [block for block in inner if block is not None]  # a pipeline stage lacks some
    return found

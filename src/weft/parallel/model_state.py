"""What `parallel/` knows of one model: what was asked for, on which ranks, and what it has put around its forwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.config.mesh import ParallelSection
from weft.config.model import CustomModelSection, ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.data.batches.batch import Batch
from weft.parallel.world import World

ATTRIBUTE = "weft_state"  # of the model: the only one that `parallel/` adds to a module


class TokenShard(Protocol):
    """Which tokens of each sequence a rank of `cp` has (`weft.parallel.axes.context.Context`)."""

    def own(self, batch: Batch) -> Batch: ...

    def extra(self, batch: Batch) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ModelPlan:
    """What a model is to become, on any mesh.

    Attributes:
        dtype: of computing. State is float32 (float64 for float64).
        reduce_dtype: of gradients while they are summed over ranks; None: the state's.
        seed: initial weights are a function of it and of the parameters' names, not of the mesh.
        activation_checkpointing: `training.activation_checkpointing`.
        only_rows_from: freeze all parameters but the embedding and the head (whose rows below it `OldRows` keeps).
        sequence: tokens per sequence, on which the cost of a pipeline's stages depends; 0: not known.
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
        """Of parameters, of the residual stream and, by default, of the sums of gradients."""
        return torch.promote_types(self.dtype, torch.float32)


@dataclass
class ModelState:
    """The state of one sharded model, an attribute of its root module (`state_of`); a pipeline's stages share it.

    Attributes:
        context: which tokens of each sequence are this rank's; None without `cp`.
        shares: (module, parameter's name) -> what this rank adds of a replicated parameter that every `tp` rank adds
            to a partial sum.
        local: a DTensor parameter -> the plain tensor that this rank computes with.
        unsharded_units: FSDP2's units that are not sharded over several ranks, so there is nothing to free.
        wrappers: module -> what wraps its forward, innermost first.
        seams: module -> attribute -> what `parallel/` has put there in place of the model's own.
    """

    plan: ModelPlan
    world: World
    local: Callable[[DTensor], torch.Tensor]
    context: TokenShard | None = None
    shares: dict[tuple[nn.Module, str], float] = field(default_factory=dict)
    unsharded_units: set[nn.Module] = field(default_factory=set)
    wrappers: defaultdict[nn.Module, list[str]] = field(default_factory=lambda: defaultdict(list))
    seams: defaultdict[nn.Module, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))

    def wrap(self, module: nn.Module, label: str, wrapper: Callable[[Callable], Callable]) -> None:
        """Replace a module's forward by `wrapper(forward)`, if that is another. Nothing else replaces one.

        The forward, and not the module: names of parameters stay what they are, and hooks (FSDP2's) stay outside.
        """
        forward = module.forward
        wrapped = wrapper(forward)
        if wrapped is not forward:
            module.forward = wrapped
            self.wrappers[module].append(label)

    def fill(self, module: nn.Module, seam: str, label: str, value: object) -> None:
        """Put something in a seam that the model's code leaves for it."""
        setattr(module, seam, value)
        self.seams[module][seam] = label


def state_of(model: nn.Module) -> ModelState | None:
    """The state of a model that `build_sharded_model` has made; None of any other."""
    return getattr(model, ATTRIBUTE, None)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the model's outermost `nn.ModuleList`s: the units that are checkpointed, compiled and sharded."""
    found: list[nn.Module] = []
    for child in model.children():
        inner = child if isinstance(child, nn.ModuleList) else repeated_blocks(child)
        found += [one for one in inner if one is not None]  # a pipeline's stage has not all
    return found

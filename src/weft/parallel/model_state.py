"""Defines the state of a sharded model: the plan, the ranks, and the wrappers of forward methods."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.config.adapter import AdapterSection
from weft.config.mesh import ParallelSection
from weft.config.model import CustomModelSection, ModelSection
from weft.config.run import RunConfig
from weft.config.training import QatSection
from weft.config.transformers_model import TransformersModelSection
from weft.errors import UserError
from weft.parallel.world import World

if TYPE_CHECKING:
    from weft.parallel.axes.context import SequenceShard
    from weft.parallel.gradients.buckets import ReplicaSums
    from weft.parallel.passes import Passes

ATTRIBUTE = "weft_state"  # name of the only attribute that `parallel/` adds to a model


@dataclass(frozen=True)
class ModelPlan:
    """A description of how to build and shard a model, independent of the number of ranks.

    Attributes:
        dtype: dtype of the computation. Parameters are float32 (float64 if `dtype` is float64).
        reduce_dtype: dtype of gradients in reductions over ranks; None means `state_dtype`.
        seed: seed of initial weights, which depend on this seed and on parameter names, not on the mesh.
        draw: whether to draw initial weights. False: weights are loaded, and until then uninitialized, except for those
            that the class of a custom model sets.
        compile: value of `training.compile`.
        activation_checkpointing: value of `training.activation_checkpointing`.
        only_rows_from: first row to train of the embedding and the head. All other parameters are frozen, and
            `FrozenRows` keeps the rows before this row unchanged. None trains all parameters.
        freeze: patterns of the names of parameters that are not trained (`weft.models.parameter_patterns`).
        sequence: number of tokens per sequence, to balance the cost of pipeline stages; 0 means unknown.
        fp8: value of `training.fp8`.
        qat: settings of quantization-aware training; None: no fake quantization.
        adapter: the adapter to train. All other parameters are frozen, in `dtype`. None trains the parameters of the
            model.
        frozen: whether all parameters are frozen, in `dtype`.
        projections: number of a hidden state -> size to which the decoder projects it (`Decoder.projections`).
    """

    model: ModelSection | TransformersModelSection | CustomModelSection
    parallel: ParallelSection
    dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None
    seed: int = 0
    draw: bool = True
    compile: bool | Literal["reduce-overhead"] = False
    activation_checkpointing: str = "none"
    only_rows_from: int | None = None
    freeze: tuple[str, ...] = ()
    sequence: int = 0
    fp8: bool | Literal["rowwise"] = False
    adapter: AdapterSection | None = None
    qat: QatSection | None = None
    frozen: bool = False
    projections: Mapping[int, int] = field(default_factory=dict)

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of parameters, of the residual stream and, by default, of gradient reductions."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def gathers_again(self) -> bool:
        """Whether backward gathers the inputs of layers over `tp` again. Compiled code and checkpointed blocks decide
        themselves what they save.
        """
        return self.activation_checkpointing == "none" and not self.compile


def model_plan(config: RunConfig) -> ModelPlan:
    """Returns the plan from which the model of a run is built. `training.dtype` must not be "auto"."""
    training = config.training
    return ModelPlan(
        config.model,
        config.parallel,
        dtype=getattr(torch, training.dtype),
        reduce_dtype=None if training.reduce_dtype == "auto" else getattr(torch, training.reduce_dtype),
        seed=config.run.seed,
        compile=training.compile,
        activation_checkpointing=training.activation_checkpointing,
        only_rows_from=training.only_rows_from,
        freeze=tuple(training.freeze),
        sequence=config.data.sequence_length or 0,
        fp8=training.fp8,
        adapter=config.adapter,
        qat=training.qat,
    )


@dataclass(frozen=True)
class BaseModel:
    """The model to which an adapter is added.

    Attributes:
        path: a checkpoint or a Hugging Face folder.
        digest: digest of the weights (`weft.checkpoint.base_model.weights_digest`).
        lacks: a message for each part of the model that it lacks (`new_parts`).
    """

    path: Path
    digest: str
    lacks: Sequence[str] = ()


@dataclass
class ModelState:
    """The state of one sharded model. All pipeline stages of a rank share one state. `state_of(model)` returns it.

    Attributes:
        local: function from a DTensor parameter to the plain tensor that this rank computes with.
        sequence_shard: selects this rank's shard of each sequence; None without `cp`.
        scales: (module, parameter name) -> multiplier of the parameter in forward. With `tp`, every rank adds a
            replicated bias to its partial output, so the multiplier is 1 / number of `tp` ranks.
        sums: sums gradients over replicas that are on one rank each; None: FSDP2 does, or there are none.
        reduces_every: whether gradients are reduced with every micro-batch. By default as the plan's section says;
            `choose_reduction` sets it.
        ends: decoder or pipeline stage -> its embedding and its head, if they are FSDP2 units (`separate_ends`).
        unsharded_units: FSDP2 units on a single rank, whose parameters are never freed.
        wrappers: module -> labels of the wrappers of the module's forward, innermost first.
        base: the base model whose weights were loaded, if the model has an adapter.
        assigned: module -> {name of an attribute that `fill` assigned: label of the value}.
        passes: class, or function with the same arguments, that runs the micro-batches of this model; None: that of
            `passes_of`.
    """

    plan: ModelPlan
    world: World
    local: Callable[[DTensor], torch.Tensor]
    sequence_shard: SequenceShard | None = None
    sums: ReplicaSums | None = None
    base: BaseModel | None = None
    passes: Callable[..., Passes] | None = None
    scales: dict[tuple[nn.Module, str], float] = field(default_factory=dict)
    reduces_every: bool = field(init=False)
    ends: defaultdict[nn.Module, list[nn.Module]] = field(default_factory=lambda: defaultdict(list))
    unsharded_units: set[nn.Module] = field(default_factory=set)
    wrappers: defaultdict[nn.Module, list[str]] = field(default_factory=lambda: defaultdict(list))
    assigned: defaultdict[nn.Module, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))

    def __post_init__(self) -> None:
        self.reduces_every = self.plan.parallel.reduces_every

    def wrap(self, module: nn.Module, label: str, wrapper: Callable[[Callable], Callable]) -> None:
        """Replaces a module's forward with `wrapper(forward)`, and records `label`, which describes the wrapper.

        No other code replaces a forward. The module object stays the same, so parameter names do not change, and module
        hooks (such as FSDP2's) run outside of the wrapper.
        """
        forward = module.forward
        wrapped = wrapper(forward)
        if wrapped is not forward:
            module.forward = wrapped
            self.wrappers[module].append(label)

    def fill(self, module: nn.Module, attribute: str, label: str, value: object) -> None:
        """Assigns `value` to an attribute of the module, and records `label`, which describes the value."""
        setattr(module, attribute, value)
        self.assigned[module][attribute] = label


def state_of(model: nn.Module) -> ModelState | None:
    """Returns the state of a model from `build_sharded_model`; None for other models."""
    return getattr(model, ATTRIBUTE, None)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the members of the outermost `nn.ModuleList`s of a model.

    These are the model's blocks. Each block is checkpointed and compiled separately, and FSDP2 shards groups of blocks.
    """
    found: list[nn.Module] = []
    for child in model.children():
        inner = child if isinstance(child, nn.ModuleList) else repeated_blocks(child)
        found += [block for block in inner if block is not None]  # None: layer of another pipeline stage
    return found


def raise_if_shared(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Raises UserError if two blocks share a parameter, because FSDP2 shards each block separately."""
    seen: dict[int, nn.Module] = {}
    for block in blocks:
        for name, parameter in block.named_parameters():
            if seen.setdefault(id(parameter), block) is not block:
                raise UserError(
                    f"model: {type(model).__name__}: several layers share the parameter {name}, but FSDP2 shards "
                    "each layer separately; create the parameter in each layer"
                )

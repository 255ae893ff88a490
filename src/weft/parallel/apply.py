"""How a plain model becomes a sharded one: an ordered list of transformations, for one rank as for thousands.

Each is a function `(module, state) -> module` that says what it assumes and what it leaves. It works on a whole model
or on one stage of a pipeline, mostly in place; with nothing to do it leaves the module alone. Names of parameters never
change. `weft profile --structure` prints what wraps what in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from weft.config.model import ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.models.build import build_model
from weft.models.decoder import Block, Decoder
from weft.models.initialize import initial_value, initialize_buffers
from weft.models.layers.moe import Experts
from weft.models.transformers_model import TransformersModel, build_transformers_model, materialize
from weft.parallel import fp8
from weft.parallel.axes.context import shard_over_cp
from weft.parallel.axes.expert import shard_over_ep
from weft.parallel.axes.fsdp import MeshParameters, raise_if_shared, replicate_scalars, shard_over_data
from weft.parallel.axes.pipeline import Stages, split
from weft.parallel.axes.single_rank import SingleRankParameters, compute_on_single_rank, is_single_rank, place_on_rank
from weft.parallel.axes.tensor import shard_over_tp
from weft.parallel.gradients.frozen_rows import freeze_all_but_rows
from weft.parallel.local_parameters import LocalParameters
from weft.parallel.memory.activations import checkpointed
from weft.parallel.memory.offload import home, move_buffers
from weft.parallel.model_state import ATTRIBUTE, ModelPlan, ModelState, repeated_blocks
from weft.parallel.randomness import seed_layers
from weft.parallel.world import World

Transformation = Callable[[nn.Module, ModelState], nn.Module]


def transformations(plan: ModelPlan, world: World) -> list[Transformation]:
    """What is done to a model (to each stage of a pipeline), in this order."""
    single = is_single_rank(plan, world)
    # Recomputation in backward has to find a rank's parameters again, so they go inside of it; compiled code must see
    # plain tensors and no DTensors, so there they go outside.
    around_blocks: list[Transformation] = (
        [checkpoint_activations, compile_blocks, use_local_parameters]
        if plan.compile
        else [use_local_parameters, checkpoint_activations]
    )
    return [
        freeze,
        use_state_dtype,
        multiply_in_fp8,
        shard_over_tp,
        shard_over_cp,
        shard_over_ep,
        place_on_rank if single else replicate_scalars,
        *around_blocks,
        seed_layers,
        compute_on_single_rank if single else shard_over_data,
    ]


def build_sharded_model(plan: ModelPlan, world: World) -> nn.Module:
    """Build a model, shard it over the ranks, and fill it with its initial weights.

    Returns:
        The model on `world.device`; its parameters are DTensors, their names those of the single-device model. Of a
        pipeline it is what this rank has (`Stages`).
    """
    model = assemble(plan, world)
    fill_weights(model, plan, world)
    return model.train()


def assemble(plan: ModelPlan, world: World) -> nn.Module:
    """The sharded model without its weights: the built-in decoder on the meta device, other models where they are."""
    single = is_single_rank(plan, world)
    state = ModelState(plan, world, SingleRankParameters(plan.dtype) if single else MeshParameters(plan, world))
    stages = build_stages(plan, world)
    for number in stages:
        raise_if_shared(stages[number], repeated_blocks(stages[number]))
        for transform in transformations(plan, world):
            stages[number] = transform(stages[number], state)
    model = Stages(stages) if world.shape.pp > 1 else stages[0]
    setattr(model, ATTRIBUTE, state)
    return model


def build_stages(plan: ModelPlan, world: World) -> dict[int, nn.Module]:
    """The plain model, or this rank's stages of it, by their numbers.

    Leaves a decoder on the meta device; the user's own model and a Transformers model with random weights with values,
    alike on every rank, as their own code draws them in one piece; one that is filled from files on the meta device.
    """
    section = plan.model
    if isinstance(section, ModelSection):
        with torch.device("meta"):
            if world.shape.pp > 1:
                return dict(split(section, plan.parallel, world, plan.sequence, plan.dtype))
            return {0: build_model(section)}
    if isinstance(section, TransformersModelSection):
        drawn = not section.weights and section.from_ is None
        return {0: world.agree(lambda: build_transformers_model(section, seed=plan.seed if drawn else None))}
    torch.manual_seed(plan.seed)
    return {0: build_model(section)}


# ---- the transformations that belong to no mesh axis; those of an axis are in its file


def freeze(model: nn.Module, state: ModelState) -> nn.Module:
    """With `only_rows_from`: freeze all but the embedding and the head. Assumes plain parameters."""
    if state.plan.only_rows_from is not None:
        freeze_all_but_rows(model, state.plan.only_rows_from)
    return model


def use_state_dtype(model: nn.Module, state: ModelState) -> nn.Module:
    """Have parameters and buffers in the dtype of the state. Assumes plain parameters.

    What is computed in a narrower dtype is cast by the last transformation: FSDP2's policy, or its like on one rank.
    """
    model.to(state.plan.state_dtype)
    if isinstance(model, TransformersModel):
        model.set_compute_dtype(state.plan.dtype)
    return model


def multiply_in_fp8(model: nn.Module, state: ModelState) -> nn.Module:
    """With `fp8`: swap the blocks' linear layers for torchao's. Assumes plain parameters, not sharded; leaves these."""
    if state.plan.fp8:
        fp8.use_fp8(model, repeated_blocks(model), ranks=state.world.shape.tp)
    return model


def use_local_parameters(model: nn.Module, state: ModelState) -> nn.Module:
    """Have forwards compute with this rank's plain tensors in the place of DTensor parameters.

    Assumes that `tp`, `ep` and a single rank have made their DTensors. FSDP2 makes the rest later, and puts plain
    tensors in their place by itself. A unit of FSDP2 (block, experts, the rest) is wrapped by itself: its parameters
    are there when its forward begins.
    """
    blocks = repeated_blocks(model)
    experts = [one for one in model.modules() if isinstance(one, Experts)] if state.world.experts is not None else []
    for unit, apart in [*((block, experts) for block in blocks), *((one, []) for one in experts), (model, blocks)]:
        found = LocalParameters(unit, apart, state)
        state.wrap(unit, f"local parameters: plain tensors of {len(found.places)} DTensors", found.around)
    return model


def checkpoint_activations(model: nn.Module, state: ModelState) -> nn.Module:
    """Have blocks keep for backward what `activation_checkpointing` says. Assumes nothing of parameters."""
    mode, compile = state.plan.activation_checkpointing, state.plan.compile
    for block, number, of in numbered_blocks(model):
        wrapper = partial(checkpointed, mode=mode, number=number, of=of, compile=compile)
        state.wrap(block, f"activation checkpointing ({mode})", wrapper)
    return model


def compile_blocks(model: nn.Module, state: ModelState) -> nn.Module:
    """Compile each block's forward, and the loss of a model that has `token_logprobs`.

    Assumes that checkpointing is inside, where the compiler sees it, and that DTensors are replaced outside.
    """
    for block in repeated_blocks(model):
        options = compiler_options(block, state.world.device)
        state.wrap(block, "torch.compile", partial(torch.compile, options=options))
    if (token_logprobs := getattr(model, "token_logprobs", None)) is not None:
        state.fill(model, "token_logprobs", "torch.compile", partial(token_logprobs, compiled=True))
    return model


def compiler_options(block: nn.Module, device: torch.device) -> dict[str, str | int | bool | Callable]:
    """What Inductor is to be told of a block.

    Side by side, attention's and the MLP's output biases have one gradient. Inductor's code for CPUs (of PyTorch 2.11
    to 2.13) sums it for both in one loop, declares the sum twice if it is rounded to 16 bits, and does not compile.
    """
    both = device.type == "cpu" and isinstance(block, Block) and block.parallel
    return {"cpp.max_horizontal_fusion_size": 1} if both else {}


def numbered_blocks(model: nn.Module) -> list[tuple[nn.Module, int, int]]:
    """Each block with its number in the whole model and the number of all: a stage has some of the layers."""
    blocks = repeated_blocks(model)
    if isinstance(model, Decoder):
        return [(layer, number, len(model.layers)) for number, layer in enumerate(model.layers) if layer is not None]
    return [(block, number, len(blocks)) for number, block in enumerate(blocks)]


# ---- weights


def fill_weights(model: nn.Module, plan: ModelPlan, world: World) -> None:
    """Give a sharded model memory on its device, and its initial weights unless files will fill it."""
    device = home(plan.parallel.offload, world.device)
    if isinstance(plan.model, ModelSection):
        for stage in model.stages.values() if isinstance(model, Stages) else [model]:
            stage.to_empty(device=device)
        fill(model, plan.seed)
    elif isinstance(plan.model, TransformersModelSection) and next(model.parameters()).is_meta:
        materialize(model, device)
    else:
        model.to(device)
    move_buffers(model, world.device)


@torch.no_grad()
def fill(model: nn.Module, seed: int) -> None:
    """Give every parameter its initial value: drawn whole, by name, then cut to this rank's part."""
    for name, parameter in model.named_parameters():
        value = initial_value(model, name, seed, dtype=parameter.dtype)
        if isinstance(parameter, DTensor):
            # src_data_rank=None: every rank has drawn the same whole tensor, so nothing needs to be sent.
            value = distribute_tensor(
                value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        parameter.copy_(value)
    initialize_buffers(model, seed)

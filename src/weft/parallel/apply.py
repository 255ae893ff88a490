"""How a plain model becomes a sharded one, in one visible order. The same lines for one process and for thousands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from weft.config.errors import UserError
from weft.config.foreign import ForeignModelSection
from weft.config.mesh import ParallelSection
from weft.config.model import CustomModelSection, ModelSection
from weft.models.build import build_model
from weft.models.decoder import Block, Decoder
from weft.models.foreign import ForeignModel, build_foreign, materialize
from weft.models.initialize import initial_value, initialize_buffers
from weft.models.layers.experts import Experts
from weft.models.sharding import decoder_sharding
from weft.parallel.axes.alone import is_alone, whole_part, widen
from weft.parallel.axes.context import Context, way_of
from weft.parallel.axes.experts import exchange_tokens
from weft.parallel.axes.fsdp import shard
from weft.parallel.axes.own import cut_own
from weft.parallel.axes.pipeline import Stages, split
from weft.parallel.axes.tensor import cut_parameters, local_part, local_parts, overlap, share_parts
from weft.parallel.fp8 import use_fp8
from weft.parallel.gradients.old_rows import freeze_all_but_rows
from weft.parallel.memory.activations import checkpointed
from weft.parallel.memory.offload import home, move_buffers
from weft.parallel.randomness import seed_layers
from weft.parallel.world import World


def parallelize(
    model_section: ModelSection | ForeignModelSection | CustomModelSection,
    parallel: ParallelSection,
    world: World,
    *,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype | None = None,
    seed: int,
    compile: bool = False,
    activation_checkpointing: str = "none",
    only_rows_from: int | None = None,
    sequence: int = 0,
    fp8: bool = False,
) -> nn.Module:
    """Build the model on the meta device, freeze, split, cut, checkpoint, compile, shard and fill it.

    Args:
        dtype: of computing. State is float32 (float64 for float64).
        reduce_dtype: of gradients while they are summed; default: the state's.
        seed: the weights are a function of it and of the parameters' names, not of the mesh.
        only_rows_from: freeze all parameters but the embedding and the head (whose rows below it `OldRows` keeps).
        sequence: tokens per row, of which depends what a pipeline's stages cost.
        fp8: multiply by the blocks' matrices in 8 bits.

    Returns:
        The model on `world.device`; its parameters are DTensors, their names those of the single-device model. Of a
        pipeline it is what this rank has (`Stages`).
    """
    state_dtype = torch.promote_types(dtype, torch.float32)
    alone = is_alone(world, parallel, dtype, reduce_dtype)
    built_in = isinstance(model_section, ModelSection)
    if built_in:
        with torch.device("meta"):
            if world.shape.pp > 1:
                model = split(model_section, parallel, world, sequence, dtype)
            else:
                model = build_model(model_section)
    elif isinstance(model_section, ForeignModelSection):
        # Random weights are drawn by its class in one piece, alike on every rank; others are filled in later.
        drawn = not model_section.weights and model_section.from_ is None
        model = world.agree(lambda: build_foreign(model_section, seed=seed if drawn else None))
    else:
        torch.manual_seed(seed)  # a model of the user's own initializes itself: alike on every rank
        model = build_model(model_section)
    model.to(state_dtype)
    if isinstance(model, ForeignModel):
        model.compute_in(dtype)

    if only_rows_from is not None:
        freeze_all_but_rows(model, only_rows_from)
    for stage in model.stages if isinstance(model, Stages) else (model,):
        stage.to(state_dtype)
        blocks = repeated_blocks(stage)
        if fp8:
            use_fp8(stage, blocks, ranks=world.shape.tp)
        cut(stage, parallel, world, sequence)
        if alone:
            cut_parameters(stage, {"*": 0}, world.fsdp)
        _raise_if_shared(stage, blocks)
        part_of = partial(whole_part, dtype=dtype) if alone else local_part
        wrap(stage, blocks, world, part_of, activation_checkpointing=activation_checkpointing, compile=compile)
        if alone:
            widen(stage, blocks, state_dtype)
        else:
            shard(stage, blocks, parallel, world, dtype, reduce_dtype)
        if built_in:
            stage.to_empty(device=home(parallel.offload, world.device))

    if isinstance(model_section, ForeignModelSection) and next(model.parameters()).is_meta:
        materialize(model, home(parallel.offload, world.device))
    elif built_in:
        fill(model, seed)
    else:
        model.to(home(parallel.offload, world.device))
    move_buffers(model, world.device)
    return model.train()


def wrap(
    model: nn.Module,
    blocks: list[nn.Module],
    world: World,
    part_of: Callable,
    *,
    activation_checkpointing: str,
    compile: bool,
) -> None:
    """Have blocks keep less for backward, compile them, and put a rank's own parts in the place of parameters."""
    experts = [module for module in model.modules() if isinstance(module, Experts)] if world.experts is not None else []
    for number, block in enumerate(blocks):
        # The forward, not the module: FSDP's hooks stay outside, and names stay what they are. Compiled code is given
        # a rank's parts; what is computed again in backward has to find them again.
        if not compile:
            block.forward = local_parts(block.forward, block, experts, part_of=part_of)
        of = len(blocks)
        if isinstance(model, Decoder):  # a stage has some of the layers
            number, of = block.attention.layer, len(model.layers)
        block.forward = checkpointed(block.forward, activation_checkpointing, number, of, compile=compile)
        if compile:
            block.forward = torch.compile(block.forward, options=compiler_options(block, world.device))
            block.forward = local_parts(block.forward, block, experts, part_of=part_of)
    seed_layers(model, blocks)
    for one in experts:
        one.forward = local_parts(one.forward, one)
    model.forward = local_parts(model.forward, model, blocks, part_of=part_of)
    if compile and hasattr(model, "token_logprobs"):
        model.token_logprobs = partial(model.token_logprobs, compiled=True)


def cut(model: nn.Module, parallel: ParallelSection, world: World, sequence: int) -> None:
    """Cut matrices over `tp`, rows over `cp` and experts over `ep`, and have the model's parts talk accordingly."""
    tp = world.tensor
    model.weft_context = None
    if tp is None and world.experts is None and world.shape.cp == 1:
        return
    if tp is not None and parallel.async_tp:
        world.agree(lambda: overlap(tp))
    if not isinstance(model, Decoder):
        cut_own(model, world, sequence)
        return
    table = decoder_sharding(model.config, world.shape.tp)
    if tp is not None:
        share_parts(model, table, tp)
    if world.shape.cp > 1:
        way = way_of(model.config, parallel.context, world.shape.cp, world.shape.tp)
        model.weft_context = Context(model.config, world.group("cp"), way)
        model.weft_context.apply(model)
    if world.experts is not None:
        exchange_tokens(model, world.experts.get_group("ep"))
    cut_parameters(model, table, tp, world.experts)


def compiler_options(block: nn.Module, device: torch.device) -> dict[str, int]:
    """What Inductor is to be told of a block.

    Side by side, attention's and the MLP's output biases have one gradient. Inductor's code for CPUs (of PyTorch 2.11
    to 2.13) sums it for both in one loop, declares the sum twice if it is rounded to 16 bits, and does not compile.
    """
    both = device.type == "cpu" and isinstance(block, Block) and block.parallel
    return {"cpp.max_horizontal_fusion_size": 1} if both else {}


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the model's outermost `nn.ModuleList`s: the units that are checkpointed, compiled and sharded."""
    found: list[nn.Module] = []
    for child in model.children():
        inner = child if isinstance(child, nn.ModuleList) else repeated_blocks(child)
        found += [one for one in inner if one is not None]  # a pipeline's stage has not all
    return found


def _raise_if_shared(model: nn.Module, blocks: list[nn.Module]) -> None:
    """FSDP2 cannot gather one parameter with two blocks. Raises UserError, naming it."""
    seen: dict[int, nn.Module] = {}
    for block in blocks:
        for name, parameter in block.named_parameters():
            if seen.setdefault(id(parameter), block) is not block:
                raise UserError(
                    f"model: {type(model).__name__}: several layers share one {name}, and layers are sharded one by "
                    "one; a model with shared layers cannot be trained here"
                )


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

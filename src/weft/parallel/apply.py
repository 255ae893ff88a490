"""Builds a sharded model from a plain (unsharded) model, by an ordered list of transformations.

A transformation is a function `(module, state) -> module`. Its docstring states what it assumes of the module and what
it guarantees. It transforms a full model or a pipeline stage, mostly in place. If there is nothing to do, it returns
the module unchanged. Parameter names never change. `weft profile --structure` prints the resulting wrappers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from weft.config.adapter import trained_heads
from weft.config.legal_mesh import check_tensor_parallel
from weft.config.mesh import ParallelSection
from weft.config.model import ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.kernels.compiler import compiled
from weft.kernels.linear import ONEDNN, linear
from weft.models.adapter import is_adapter
from weft.models.build import build_model
from weft.models.decoder import Decoder
from weft.models.initialize import initial_value, initialize_buffers, on_meta
from weft.models.layers.block import Block
from weft.models.layers.moe import Experts
from weft.models.parameter_patterns import last_match
from weft.models.roles import parameter_roles
from weft.models.transformers_model import TransformersModel, build_transformers_model, materialize
from weft.parallel import fp8, qat
from weft.parallel.adapter import adapt, fill_adapter
from weft.parallel.axes.context import shard_over_cp
from weft.parallel.axes.expert import shard_over_ep
from weft.parallel.axes.fsdp import MeshParameters, replicate_scalars, separate_ends, shard_over_data
from weft.parallel.axes.local_stages import Stages, build_local_stages
from weft.parallel.axes.single_rank import SingleRankParameters, cast_outputs, is_single_rank, place_on_rank
from weft.parallel.axes.tensor import shard_over_tp
from weft.parallel.gradients.buckets import ReplicaSums
from weft.parallel.gradients.frozen_rows import freeze_all_but_rows
from weft.parallel.local_parameters import LocalParameters, local, shard_part
from weft.parallel.memory.activations import checkpointed
from weft.parallel.memory.offload import move_buffers, parameter_device
from weft.parallel.model_state import ATTRIBUTE, ModelPlan, ModelState, raise_if_shared, repeated_blocks
from weft.parallel.randomness import seed_layers
from weft.parallel.world import World

Transformation = Callable[[nn.Module, ModelState], nn.Module]


def transformations(plan: ModelPlan, world: World) -> list[Transformation]:
    """Returns the transformations to apply to a model, or to each pipeline stage, in order."""
    single = is_single_rank(plan, world)
    # Recomputation in backward needs the local parameters again, so they are set inside of activation checkpointing.
    # Compiled code must not see DTensors, so with `compile` the local parameters are set outside of it.
    around_blocks: list[Transformation] = (
        [checkpoint_activations, compile_blocks, use_local_parameters]
        if plan.compile
        else [use_local_parameters, checkpoint_activations]
    )
    return [
        freeze,
        use_state_dtype,
        multiply_in_fp8,
        fake_quantize,
        adapt,
        multiply_with_onednn,
        use_frozen_dtype,
        shard_over_tp,
        check_quantized_groups,
        shard_over_cp,
        shard_over_ep,
        *([place_on_rank] if single else [replicate_scalars, separate_ends]),
        widen_residual_stream,
        *around_blocks,
        seed_layers,
        cast_outputs if single else shard_over_data,
    ]


def build_sharded_model(plan: ModelPlan, world: World) -> nn.Module:
    """Builds a model, shards it, and initializes its weights.

    Returns:
        The model on `world.device`, in training mode. Its parameters are DTensors with the names of the single-device
        model. With pipeline parallelism, the returned model is this rank's `Stages`.
    """
    model = assemble(plan, world)
    fill_weights(model, plan, world)
    return model.train()


def shard_for_inference(model: nn.Module, world: World) -> None:
    """Shards a decoder over `tp` only. Does not cast parameters, and does not apply FSDP2.

    Assumes plain parameters (no DTensors). They can be on the meta device.

    Raises:
        UserError: the size of `tp` does not divide a dimension that tensor parallelism splits.
    """
    assert isinstance(model, Decoder)
    check_tensor_parallel(model.config, world.shape.tp)
    plan = ModelPlan(model.config, ParallelSection(tp=world.shape.tp))
    state = ModelState(plan, world, local)
    use_local_parameters(shard_over_tp(model, state), state)
    setattr(model, ATTRIBUTE, state)


def assemble(plan: ModelPlan, world: World) -> nn.Module:
    """Builds a model and applies the transformations. `fill_weights` must be called afterwards.

    The returned model is on the meta device if it is the built-in decoder, or a Transformers model that is loaded from
    files.
    """
    single = is_single_rank(plan, world)
    sums = ReplicaSums(world.group("dp_replicate")) if single and world.ranks > 1 else None
    state = ModelState(plan, world, SingleRankParameters(plan.dtype, sums) if single else MeshParameters(plan, world))
    state.sums = sums
    stages = build_stages(plan, world)
    for number in stages:
        raise_if_shared(stages[number], repeated_blocks(stages[number]))
        for transform in transformations(plan, world):
            stages[number] = transform(stages[number], state)
    model = Stages(stages) if world.shape.pp > 1 else stages[0]
    setattr(model, ATTRIBUTE, state)
    return model


def build_stages(plan: ModelPlan, world: World) -> dict[int, nn.Module]:
    """Builds the plain (unsharded) model, or this rank's pipeline stages.

    Returns stage index -> module; without a pipeline, the index of the model is 0.

    The built-in decoder, and a Transformers model that is loaded from files, are on the meta device. Other models have
    the parameters that their own code initializes, equal on all ranks.
    """
    section = plan.model
    if isinstance(section, ModelSection):
        with on_meta():
            if world.shape.pp > 1:
                return dict(build_local_stages(section, plan.parallel, world, plan.sequence, plan.dtype))
            model = Decoder(section)
            for number, size in plan.projections.items():
                model.projections[str(number)] = nn.Linear(section.hidden_size, size, bias=False)
            return {0: model}
    if isinstance(section, TransformersModelSection):
        drawn = plan.draw and not section.weights and section.from_ is None
        return {0: world.agree(lambda: build_transformers_model(section, seed=plan.seed if drawn else None))}
    torch.manual_seed(plan.seed)
    return {0: build_model(section)}


# ---- transformations that belong to no mesh axis; the module of an axis defines the transformation of that axis


def freeze(model: nn.Module, state: ModelState) -> nn.Module:
    """Freezes parameters: all except embedding and head if `ModelPlan.only_rows_from` is set; and those that match
    `ModelPlan.freeze`. Assumes plain parameters.
    """
    if state.plan.only_rows_from is not None:
        freeze_all_but_rows(model, state.plan.only_rows_from)
    for name, parameter in model.named_parameters():
        if last_match(name, state.plan.freeze) is not None:
            parameter.requires_grad_(False)
    return model


def use_state_dtype(model: nn.Module, state: ModelState) -> nn.Module:
    """Casts parameters and buffers to `ModelPlan.state_dtype`. Assumes plain parameters.

    Each forward pass casts parameters to the compute dtype (by FSDP2 or, on a single rank, `SingleRankParameters`).
    """
    model.to(state.plan.state_dtype)
    if isinstance(model, TransformersModel):
        model.set_compute_dtype(state.plan.dtype)
    return model


def multiply_in_fp8(model: nn.Module, state: ModelState) -> nn.Module:
    """If `ModelPlan.fp8` is set, replaces the blocks' linear layers with torchao's FP8 linear layers.

    Assumes plain (unsharded) parameters.
    """
    if state.plan.fp8:
        fp8.use_fp8(model, repeated_blocks(model), state.plan.fp8, ranks=state.world.shape.tp)
    return model


def use_frozen_dtype(model: nn.Module, state: ModelState) -> nn.Module:
    """Freezes all parameters if `ModelPlan.frozen` is set. Casts a frozen model, or the base model of an adapter, to
    the compute dtype; the trained parameters of an adapter run keep `ModelPlan.state_dtype`. Assumes plain parameters.
    """
    plan = state.plan
    if plan.frozen:
        model.requires_grad_(False)
    for name, parameter in model.named_parameters() if plan.frozen or plan.adapter is not None else ():
        if not (is_adapter(name) or parameter.requires_grad) and parameter.is_floating_point():
            parameter.data = parameter.data.to(plan.dtype)
    return model


def fake_quantize(model: nn.Module, state: ModelState) -> nn.Module:
    """If `ModelPlan.qat` is set, makes linear layers, experts and head round their weights (quantization-aware
    training).

    Assumes plain (unsharded) parameters, and modules whose forward is not wrapped.
    """
    if state.plan.qat is not None:
        qat.fake_quantize(model, state.plan.qat, state)
    return model


def multiply_with_onednn(model: nn.Module, state: ModelState) -> nn.Module:
    """Makes linear layers compute with oneDNN in float32, on a CPU on which it is faster than MKL.

    Assumes that all transformations that replace the forward of linear layers were applied; those layers stay.
    """
    if state.plan.dtype == torch.float32 and state.world.device.type == "cpu" and ONEDNN:
        for module in model.modules():
            if type(module) is nn.Linear and "forward" not in vars(module):
                state.wrap(module, "oneDNN", lambda _, module=module: partial(_linear, module))
    return model


def _linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x, module.weight, module.bias)


def check_quantized_groups(model: nn.Module, state: ModelState) -> nn.Module:
    """Refuses `tp` that splits the groups of `fake_quantize`. Assumes that `shard_over_tp` was applied."""
    if state.plan.qat is not None:
        qat.raise_if_groups_split(model, state.plan.qat)
    return model


def use_local_parameters(model: nn.Module, state: ModelState) -> nn.Module:
    """Makes forward passes use this rank's plain tensors instead of DTensor parameters.

    Must be called after `shard_over_tp`, `shard_over_ep`, `place_on_rank` and `replicate_scalars`, which create
    DTensors. (FSDP2 itself unwraps the DTensors that it creates.) Each FSDP2 unit is wrapped separately, because FSDP2
    gathers a module's parameters when that module's forward is called.
    """
    blocks = [*repeated_blocks(model), *state.ends[model]]
    experts = [m for m in model.modules() if isinstance(m, Experts)] if state.world.ep_mesh is not None else []
    units = [*((block, experts) for block in blocks), *((module, []) for module in experts), (model, blocks)]
    for unit, nested_units in units:
        found = LocalParameters(unit, nested_units, state)
        state.wrap(unit, f"local parameters: plain tensors of {len(found.slots)} DTensors", found.wrap)
    return model


def checkpoint_activations(model: nn.Module, state: ModelState) -> nn.Module:
    """Wraps the blocks that `activation_checkpointing` selects. Makes no assumption about parameters."""
    mode, tp = state.plan.activation_checkpointing, state.world.tp_mesh
    options = {"compile": bool(state.plan.compile), "tp_group": tp and tp.get_group().group_name}
    for block, number, of in numbered_blocks(model):
        wrapper = partial(checkpointed, mode=mode, number=number, of=of, **options)
        state.wrap(block, f"activation checkpointing ({mode})", wrapper)
    return model


def compile_blocks(model: nn.Module, state: ModelState) -> nn.Module:
    """Compiles each block's forward, and the model's method `token_logprobs` if the model has this method.

    Assumes that activation checkpointing is already applied, so that the compiler sees it, and that
    `use_local_parameters` will replace DTensor parameters outside of the compiled forward.
    """
    for block in repeated_blocks(model):
        options = compiler_options(block, state.plan, state.world.device)
        state.wrap(block, "torch.compile", partial(compiled, options=options))
    if (token_logprobs := getattr(model, "token_logprobs", None)) is not None:
        state.fill(model, "token_logprobs", "torch.compile", partial(token_logprobs, compiled=True))
    return model


def widen_residual_stream(model: nn.Module, state: ModelState) -> nn.Module:
    """Sets the dtype of the decoder's residual stream before the first block to `ModelPlan.state_dtype`, which the
    outputs of the blocks have.

    Otherwise, the first block would add to embeddings in the compute dtype, and would be compiled a second time.
    """
    dtype = state.plan.state_dtype
    if isinstance(model, Decoder) and state.plan.dtype != dtype:
        state.fill(model, "residual_dtype", str(dtype), dtype)
    return model


def compiler_options(block: nn.Module, plan: ModelPlan, device: torch.device) -> dict[str, int | bool]:
    """Returns Inductor's options for a block: CUDA graphs on GPUs, if the plan has them; on CPUs, a workaround.

    In a parallel block, the output biases of attention and MLP have the same gradient. On CPUs, Inductor (PyTorch 2.11
    to 2.13) fuses both sums; in 16 bits the generated code fails to compile. The option disables this fusion.
    """
    if device.type == "cuda":
        return {"triton.cudagraphs": True} if plan.compile == "reduce-overhead" and plan.dtype.itemsize == 2 else {}
    fails = device.type == "cpu" and isinstance(block, Block) and block.parallel
    return {"cpp.max_horizontal_fusion_size": 1} if fails else {}


def numbered_blocks(model: nn.Module) -> list[tuple[nn.Module, int, int]]:
    """Returns (block, index of the block in the full model, number of blocks in the full model) for each block."""
    blocks = repeated_blocks(model)
    if isinstance(model, Decoder):
        return [(layer, number, len(model.layers)) for number, layer in enumerate(model.layers) if layer is not None]
    return [(block, number, len(blocks)) for number, block in enumerate(blocks)]


# ---- weights


def fill_weights(model: nn.Module, plan: ModelPlan, world: World) -> None:
    """Puts a sharded model on its device: allocates tensors that are on the meta device, and moves other tensors.

    Also initializes the buffers of the built-in decoder and, with `ModelPlan.draw`, its parameters. Other models have
    the weights with which they were built, except for a Transformers model that is loaded: its parameters stay
    uninitialized until then.
    """
    device = parameter_device(plan.parallel.offload, world.device)
    if isinstance(plan.model, ModelSection):
        for stage in model.stages.values() if isinstance(model, Stages) else [model]:
            stage.to_empty(device=device)
        if plan.draw:
            fill(model, plan)
        initialize_buffers(model, plan.seed)
    elif isinstance(plan.model, TransformersModelSection) and next(model.parameters()).is_meta:
        materialize(model, device)
    else:
        model.to(device)
    if plan.adapter is not None:
        fill_adapter(model, plan)
    move_buffers(model, world.device)


@torch.no_grad()
def fill(model: nn.Module, plan: ModelPlan, select: Callable[[str], bool] | None = None) -> None:
    """Initializes the parameters of the built-in decoder, independently of the mesh.

    Each rank draws its own shards, on their device, seeded by the run's seed and the parameter's name. With
    an adapter, the parameters of the base model stay uninitialized, because they are loaded; the head of a reward model
    is initialized, because a base model that predicts tokens does not have it.

    Args:
        select: function that returns whether a parameter is initialized, given its name. Default: all are.
    """
    roles, heads = parameter_roles(model), None if plan.adapter is None else trained_heads(plan.model)
    for name, parameter in model.named_parameters():
        if (heads is None or name in heads) and (select is None or select(name)):
            shard = local(parameter)
            initial_value(model, name, plan.seed, part=shard_part(parameter), out=shard, roles=roles)

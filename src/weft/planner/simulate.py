"""Measures the memory of a rank by running two steps of the real code on tensors without memory.

The tensors are those of a CPU, so compare with `memory_of(..., cpu=True)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import torch

from weft.config.components import make_component
from weft.config.derive import batch_sequences, sequence_length, split_batch
from weft.config.mesh import mesh_shape
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.data.batches.batch import Batch
from weft.errors import UserError
from weft.kernels.cross_entropy import CHUNK_ELEMENTS, KEPT_ELEMENTS
from weft.models.roles import parameter_roles
from weft.optim.parameter_groups import parameter_groups
from weft.parallel.apply import assemble
from weft.parallel.axes.local_stages import Stages
from weft.parallel.axes.pipeline import passes_of
from weft.parallel.gradients.clip import clip_gradients
from weft.parallel.local_parameters import local
from weft.parallel.model_state import model_plan
from weft.parallel.passes import Passes
from weft.parallel.structure import FakeWorld
from weft.parallel.world import meshes
from weft.planner.memory import Memory, memory_of
from weft.planner.torch_private import MemoryCounter, Received, answering, without_values
from weft.torch_private import fake_ranks

MICRO_BATCHES = 3  # the first, one between, and the last; without a pipeline, others repeat the second


@dataclass(frozen=True)
class SimulatedMemory:
    """The bytes of one rank in the second step.

    Attributes:
        rank: the rank.
        memory: its bytes at the peak, by part.
    """

    rank: int
    memory: Memory


def simulate(config: RunConfig, devices: int, *, chunks: bool = True) -> list[SimulatedMemory]:
    """Simulates rank 0 and, of a pipeline, the first rank of the stages that need most by `memory_of`.

    The process must have no process group. Arguments, conditions and errors are those of `simulate_rank`.
    """
    planned = memory_of(config, devices, cpu=True, chunks=chunks)
    worst = max(range(len(planned)), key=lambda number: planned[number].total)
    ranks = sorted({0, worst * devices // len(planned)})
    return [simulate_rank(config, devices, rank, chunks=chunks) for rank in ranks]


def simulate_rank(config: RunConfig, devices: int, rank: int = 0, *, chunks: bool = True) -> SimulatedMemory:
    """Builds the model of a rank, and runs two steps: the first one makes the optimizer's state.

    Each rank of experts receives the same number of tokens.

    Args:
        config: a run of the built-in decoder, with `objective.type: pretrain`. `training.compile` is ignored. Dtype
            "auto" is bfloat16.
        devices: number of ranks.
        rank: the simulated rank.
        chunks: whether the loss computes a few logits at a time, as on a CPU; otherwise many, as on a GPU.

    Raises:
        UserError: the model or the objective is another one, or `parallel.offload` is set.
    """
    section = config.model
    if not isinstance(section, ModelSection):
        raise UserError(f"model.type: {section.type}, but plans are for type: decoder; use weft parallelize")
    if config.objective.type != "pretrain":
        raise UserError(f"objective.type: {config.objective.type}, but memory is simulated for pretrain only")
    if config.parallel.offload != "none":  # a simulated rank is a CPU: its state would count as the device's
        raise UserError(f"parallel.offload: {config.parallel.offload}, but memory is simulated without; set it to none")
    dtype = "bfloat16" if config.training.dtype == "auto" else config.training.dtype
    config = config.model_copy(
        update={"training": config.training.model_copy(update={"compile": False, "dtype": dtype})}
    )
    shape, device = mesh_shape(config.parallel, devices), torch.device("cpu")
    length, given, moe = sequence_length(config), config.training.micro_batch_size, section.moe
    per_rank, micro = split_batch(batch_sequences(config), length, shape, given, config.parallel)
    held = CHUNK_ELEMENTS["cpu"] if chunks else KEPT_ELEMENTS
    rows = per_rank if shape.pp > 1 else min(per_rank, MICRO_BATCHES * micro)
    tokens = micro * length // shape.cp
    routed = (int(tokens * moe.ranks_per_token(shape.ep)), tokens * moe.num_experts_per_tok) if moe else (0, 0)
    with (
        fake_ranks(devices, rank),
        without_values(*routed) as mode,
        # All chunks of logits need the same memory, and computing thousands of them would take minutes.
        mock.patch(
            "weft.kernels.cross_entropy._chunks", lambda logits, _: [slice(0, max(1, held // logits.shape[-1]))]
        ),
        # Soft caps and sinks never materialize all scores on GPUs, or on CPUs in float32. `fits` refuses fake tensors.
        mock.patch("weft.kernels.attention.fits", lambda *_, plain: not plain),
        mock.patch("weft.kernels.masks.usable", lambda *_, plain: not plain),
    ):
        world = FakeWorld(rank, devices, device, shape, **meshes(shape, device))
        model = assemble(model_plan(config), world)
        with mode:  # a model that is built within the mode would take minutes
            for stage in model.stages.values() if isinstance(model, Stages) else [model]:
                stage.to_empty(device=device)
        model.train()
        groups = parameter_groups(model, parameter_roles(model), config.optimizer.no_decay, None)
        optimizer = make_component(config.optimizer, "optimizer", groups)
        passes = passes_of(model, make_component(config.objective, "objective"), world, config.parallel)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with answering(mode), MemoryCounter(mode, map(local, model.parameters())) as memory, Received():
            passes.after_update()
            for _ in range(2):
                memory.reset(_state(optimizer))
                _step(config, world, passes, parameters, optimizer, _batch(rows, length), micro)
        return SimulatedMemory(rank, Memory(**memory.peak))


def _step(
    config: RunConfig,
    world: FakeWorld,
    passes: Passes,
    parameters: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    micro: int,
) -> None:
    """Computes the gradients of a batch, clips them, and updates the weights, as `weft.train.loop` does."""
    weight = float(batch.tokens.numel() * world.shape.data_ranks)
    passes.train(batch.split(micro), weight=weight, learned_tokens=weight, seed=lambda sample: sample)
    clip_gradients(parameters, config.training.grad_clip, world.pp_group, world.device)
    optimizer.step()
    passes.after_update()
    optimizer.zero_grad()


def _batch(rows: int, length: int) -> Batch:
    tokens, positions = torch.zeros(rows, length, dtype=torch.long), torch.arange(length).repeat(rows, 1)
    weight, samples = torch.ones(rows, length), torch.arange(rows)
    return Batch(
        tokens=tokens, labels=tokens.clone(), weight=weight, positions=positions, segments=None, samples=samples
    )


def _state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [local(value) for value in values if torch.is_tensor(value)]

"""A rank's step in shapes alone: of a large model on thousands of ranks in seconds, with hardly any memory."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from imagined import Unstopped, imagined, loop_of, names_of
from torch._subclasses.fake_tensor import FakeTensorMode
from wire import Call, Wire

from weft.config.derive import derive
from weft.config.run import RunConfig
from weft.kernels.cross_entropy import CHUNK_ELEMENTS
from weft.parallel.local_parameters import local
from weft.parallel.world import World, start_world
from weft.planner.torch_private import MemoryCounter, Received, answering, without_values
from weft.train.build import build

RANKS, SEQUENCE = 2048, 8192
_VOCABULARY = {"vocab_size": 128_256, "max_position_embeddings": SEQUENCE}
LLAMA_28B = _VOCABULARY | {
    "hidden_size": 6144,
    "num_hidden_layers": 56,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "intermediate_size": 21_504,
}
MOE_30B = _VOCABULARY | {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe": {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "router_aux_loss_coef": 0.001,
    },
}
# The kinds of meshes; `dp_shard` is the rest of the ranks.
MESHES: list[dict[str, Any]] = [
    {},
    {"dp_replicate": 8},
    {"tp": 8},
    {"pp": 4},
    {"pp": 4, "tp": 2, "pp_schedule": "interleaved_1f1b"},
    {"cp": 4},
    {"cp": 4, "cp_method": "all_gather"},
    {"cp": 4, "cp_method": "ring"},
    {"ep": 8},
    {"pp": 2, "dp_replicate": 2, "cp": 2, "tp": 4},
    {"pp": 2, "dp_replicate": 2, "cp": 2, "tp": 4, "ep": 8},
]


def write_run(
    folder: Path,
    mesh: dict[str, Any],
    model: dict[str, Any] | None = None,
    *,
    ranks: int = RANKS,
    sequence: int = SEQUENCE,
    micro: int = 1,
    **training: Any,
) -> Path:
    """The file of a run: `micro` rows in each step for every data rank, or two for each rank of a pipeline."""
    others = math.prod(mesh.get(axis, 1) for axis in ("pp", "dp_replicate", "cp", "tp"))
    mesh = {"dp_shard": ranks // others} | mesh
    rows = 2 * mesh["pp"] if "pp" in mesh else micro
    batch = rows * sequence * mesh["dp_shard"] * mesh.get("dp_replicate", 1)
    training = {"dtype": "bfloat16", "activation_checkpointing": "full", "steps": 2} | training
    content = {
        "run": {"name": "run", "directory": str(folder)},
        "model": model or (MOE_30B if "ep" in mesh else LLAMA_28B),
        "data": {"train": {"type": "matrix_parts:Sequences"}, "sequence_length": sequence},
        "optimizer": {"type": "adamw", "lr": 1e-4},
        "training": training | {"batch_tokens": batch, "micro_batch_size": 1},
        "parallel": mesh,
    }
    file = folder / "run.yaml"
    file.write_text("".join(f"{section}: {json.dumps(value)}\n" for section, value in content.items()))
    return file


@dataclass
class Imagined:
    """What a step of one rank is like.

    Attributes:
        building: CPU seconds for the model, on the meta device, sharded; without its values.
        step: CPU seconds of the last step.
        state: bytes of this rank's parameters, their gradients and what the optimizer keeps of them.
        peak: bytes that it needs at the most.
        resident: bytes that this process had at the most.
        calls: collectives of the last step.
    """

    building: float
    step: float
    state: int
    peak: int
    resident: int
    calls: list[Call]


def imagine(file: Path, ranks: int, rank: int = 0) -> Imagined:
    """Build the model of a run and take its steps, in shapes alone."""
    with imagined(ranks, rank):
        began = time.process_time()
        config = RunConfig.load(file)
        world = start_world(config.parallel)
        wire = Wire(names_of(world))
        with shapes_only(config, world) as mode:
            # Built inside of the mode a model would take minutes: parameters come into it when they are given memory.
            with (
                mock.patch.object(torch.nn.Module, "to_empty", _within(mode, torch.nn.Module.to_empty)),
                mock.patch("weft.parallel.apply.fill"),
            ):
                model, optimizer = build(config, world)
            building = time.process_time() - began
            with answering(mode):
                loop = loop_of(config, world, wire, model, optimizer)
                with MemoryCounter(mode, map(local, model.parameters())) as memory, Received(), wire:
                    outcome = loop.run(0, Unstopped())
                assert outcome.status == "finished", outcome
                step = time.process_time() - loop.recorder.times[-1]
                parameters = [p for p in model.parameters() if p.requires_grad]
                state = 2 * _bytes(parameters) + _bytes(
                    value for p in parameters for value in optimizer.state[p].values() if value.dim() > 0
                )
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Imagined(building, step, state, memory.most, resident, wire.calls)


@contextlib.contextmanager
def shapes_only(config: RunConfig, world: World) -> Iterator[FakeTensorMode]:
    """Tensors of the mode have no numbers. What asks for some gets an answer that a step can go on with.

    Experts are told that each of their ranks is sent as many rows as any other.
    """
    moe = getattr(config.model, "moe", None)
    length = derive(config, mesh=world.shape)
    tokens = length.micro_batch_size * length.sequence_length // world.shape.cp
    each = (moe.ranks_per_token(world.shape.ep), moe.num_experts_per_tok) if moe else (0, 0)
    rows, choices = (int(tokens * number) for number in each)

    with (
        without_values(rows, choices) as mode,
        mock.patch.dict(CHUNK_ELEMENTS, clear=True),
    ):  # a thousand chunks take long
        yield mode


def _within(mode: FakeTensorMode, function: Callable) -> Callable:
    def call(*arguments, **named):
        with mode:
            return function(*arguments, **named)

    return call


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)

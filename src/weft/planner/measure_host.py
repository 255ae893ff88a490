"""Measures what the host does for each collective: Python code of DTensor and of FSDP2 around it.

A tiny decoder runs with and without sharding. The difference of the CPU time of the thread that runs it, which does not
count waiting for other ranks, is divided by the number of collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean

import torch
from torch import nn

from weft.config.mesh import MeshShape, ParallelSection
from weft.config.model import ModelSection
from weft.models.decoder import Decoder
from weft.parallel.apply import build_sharded_model
from weft.parallel.model_state import ModelPlan
from weft.parallel.ranks import all_gather_object
from weft.parallel.world import World, meshes
from weft.planner.measure import lower_quartile

LAYERS, TOKENS, CALLS = 4, 8, 12
TP_COLLECTIVES = 2 * (4 * LAYERS + 2)  # of `planner.units`: of blocks, embedding and head, in forward and in backward
FSDP_COLLECTIVES = 3 * LAYERS + 1  # all-gathers in forward and, without the last block and the root, again; reductions


def measure_host(world: World) -> dict[str, float]:
    """Returns microseconds of the host for each collective, as `host` of a hardware file. All ranks must call it.

    Args:
        world: the ranks, of which there are at least two.
    """
    ranks = world.ranks
    section = ModelSection(
        vocab_size=4 * ranks,
        hidden_size=16 * ranks,
        num_hidden_layers=LAYERS,
        num_attention_heads=ranks,
        intermediate_size=32 * ranks,
    )
    torch.manual_seed(0)
    tokens = torch.randint(4 * ranks, (1, TOKENS * ranks), device=world.device)
    plain = Decoder(section).to(world.device)

    def sharded(parallel: ParallelSection, shape: MeshShape) -> nn.Module:
        part = World(world.rank, ranks, world.device, shape, **meshes(shape, world.device))
        return build_sharded_model(ModelPlan(section, parallel), part)

    found = {
        "tp_us": sharded(ParallelSection(tp=ranks, dp_shard=1), MeshShape(tp=ranks)),
        "fsdp_us": sharded(ParallelSection(dp_shard=ranks), MeshShape(dp_shard=ranks)),
    }
    counts = {"tp_us": TP_COLLECTIVES, "fsdp_us": FSDP_COLLECTIVES}
    alone = thread_seconds(lambda: _passes(plain, tokens))
    more = {name: thread_seconds(lambda one=model: _passes(one, tokens)) - alone for name, model in found.items()}
    answers = all_gather_object(more)
    return {name: max(0.0, fmean(one[name] for one in answers) / count * 1e6) for name, count in counts.items()}


def thread_seconds(act: Callable[[], None]) -> float:
    """Returns the CPU seconds of this thread in a call, the lower quartile of `CALLS` calls after two others."""
    found = []
    for _ in range(CALLS + 2):
        began = time.thread_time()
        act()
        found.append(time.thread_time() - began)
    return lower_quartile(found[2:])


def _passes(model: nn.Module, tokens: torch.Tensor) -> None:
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    model(tokens, positions, labels=tokens).sum().backward()

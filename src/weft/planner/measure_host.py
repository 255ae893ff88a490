"""Measures what the host does for each collective: Python code of DTensor and of FSDP2 around it.

A small decoder runs with and without sharding. The difference of the CPU time of the thread that runs it, which does
not count waiting for other ranks, is divided by the number of collectives. Two sizes tell FSDP2's copies of parameters
from its Python code.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
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
from weft.planner.measure_links import FASTEST

LAYERS, TOKENS, CALLS = 4, 8, 12
HIDDEN = (32, 384)  # of the decoders; blocks of the larger one have 6 MB of parameters
TP_COLLECTIVES = 2 * (4 * LAYERS + 2)  # of `planner.units`: of blocks, embedding and head, in forward and in backward
FSDP_COLLECTIVES = 3 * LAYERS + 5  # gathers and reductions of blocks, embedding, head and norm; gathers in backward


def measure_host(world: World) -> dict[str, float]:
    """Returns the host's part of collectives, as `host` of a hardware file. All ranks must call it.

    Args:
        world: the ranks, of which there are at least two.
    """
    found = [_seconds(world, size) for size in HIDDEN]
    answers = all_gather_object([(tp, fsdp) for tp, fsdp, _ in found])
    (tp, small), (_, large) = (
        tuple(max(0.0, fmean(each)) for each in zip(*(one[place] for one in answers), strict=True)) for place in (0, 1)
    )
    sizes = [size for _, _, size in found]
    rate = (sizes[1] - sizes[0]) / max(large - small, 1e-9)
    rates = {"fsdp_gb_s": min(FASTEST, rate / 1e9)}
    return {"tp_us": tp * 1e6, "fsdp_us": max(0.0, small - sizes[0] / rate) * 1e6, **rates}


def _seconds(world: World, hidden: int) -> tuple[float, float, int]:
    """Returns the host's seconds of a collective of `tp` and of FSDP2, and the bytes of a block's parameters."""
    ranks = world.ranks
    section = ModelSection(
        vocab_size=4 * ranks,
        hidden_size=ranks * -(-hidden // ranks),
        num_hidden_layers=LAYERS,
        num_attention_heads=ranks,
        intermediate_size=ranks * (-(-2 * hidden // ranks)),
    )
    torch.manual_seed(0)
    tokens = torch.randint(4 * ranks, (1, TOKENS * ranks), device=world.device)
    plain = Decoder(section).to(world.device)

    def sharded(parallel: ParallelSection, shape: MeshShape) -> nn.Module:
        part = World(world.rank, ranks, world.device, shape, **meshes(shape, world.device))
        return build_sharded_model(ModelPlan(section, parallel), part)

    models = [
        (sharded(ParallelSection(tp=ranks, dp_shard=1), MeshShape(tp=ranks)), TP_COLLECTIVES),
        (sharded(ParallelSection(dp_shard=ranks), MeshShape(dp_shard=ranks)), FSDP_COLLECTIVES),
    ]
    alone = thread_seconds(partial(_passes, plain, tokens))
    tp, fsdp = ((thread_seconds(partial(_passes, one, tokens)) - alone) / count for one, count in models)
    return tp, fsdp, 4 * section.layer_size(0).parameters


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

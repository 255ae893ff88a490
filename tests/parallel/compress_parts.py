"""What ranks do in the tests of compressed gradients."""

from pathlib import Path

import torch
import torch.distributed as dist
from pool import fit
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from weft.config.mesh import CompressSection, ParallelSection
from weft.parallel.gradients.clip import clip_gradients
from weft.parallel.gradients.compress import PowerSGD
from weft.parallel.world import World, start_world

ROWS, COLUMNS = 24, 16


class Little(nn.Module):
    """A matrix and a bias, cut as FSDP2 cuts them."""

    def __init__(self, world: World):
        super().__init__()
        mesh = world.mesh["dp_shard"]
        for name, shape in (("matrix", (ROWS, COLUMNS)), ("bias", (ROWS,))):
            whole = torch.zeros(shape, dtype=torch.float64)
            setattr(self, name, nn.Parameter(distribute_tensor(whole, mesh, src_data_rank=None)))
        for parameter in self.parameters():
            assert isinstance(parameter, DTensor)

    def give(self, name: str, gradient: torch.Tensor) -> None:
        parameter = getattr(self, name)
        parameter.grad = distribute_tensor(
            gradient.clone(), parameter.device_mesh, parameter.placements, src_data_rank=None
        )


def sums(parallel: dict, rank: int, true_rank: int, steps: int, broken: int | None = None) -> list[dict]:
    """What is told of seeded gradients whose sum over the copies has rank `true_rank`.

    Args:
        broken: the step in which the last copy's matrix has an infinity in it.

    Returns:
        Of each step: the sums as they are and as they should be, the norm, and what is kept for the next step.
    """
    world = start_world(ParallelSection(**parallel))
    model = Little(world)
    section = CompressSection(rank=rank, start_step=0)
    compress = PowerSGD(section, model, world, dtype=torch.float64, seed=3)
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        normal = {"generator": generator, "dtype": torch.float64}
        shared = torch.randn(COLUMNS, true_rank, **normal)
        copies = world.shape.dp_replicate
        matrices = [torch.randn(ROWS, true_rank, **normal) @ shared.T for _ in range(copies)]
        biases = [torch.randn(ROWS, **normal) for _ in range(copies)]
        if step == broken:
            matrices[-1][-1, -1] = torch.inf
        model.give("matrix", matrices[world.axis_rank("dp_replicate")])
        model.give("bias", biases[world.axis_rank("dp_replicate")])
        compress.reduce(step)
        found.append(
            {
                "matrix": model.matrix.grad.full_tensor().clone(),
                "bias": model.bias.grad.full_tensor().clone(),
                "sum": sum(matrices),
                "bias_sum": sum(biases),
                "norm": clip_gradients(list(model.parameters()), None),
                "kept": {name: value.full_tensor().clone() for name, value in compress.state().items()},
                "share": compress.share,
            }
        )
    world.close()
    return found


def fit_counting(file: Path, fresh: bool) -> int:
    """Train on copies of one rank, and return how many bytes were summed over them."""
    told, plain = 0, dist.all_reduce

    def counting(tensor, *arguments, **named):
        nonlocal told
        told += tensor.numel() * tensor.element_size()
        return plain(tensor, *arguments, **named)

    dist.all_reduce = counting
    try:
        fit(file, fresh)
    finally:
        dist.all_reduce = plain
    return told

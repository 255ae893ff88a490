"""Gradients of two replicas, summed in small buckets."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor

from weft.config.mesh import ParallelSection
from weft.parallel.gradients import buckets
from weft.parallel.local_parameters import local
from weft.parallel.world import start_world
from weft.torch_private import dtensor_like

SIZES = (4, 3, 30, 2, 5, 7)
WITHOUT = 3  # this parameter has no gradient


def sum_in_buckets():
    """Sums twice, in other orders on the ranks. Returns the gradients, and sizes of all-reduces."""
    world = start_world(ParallelSection(dp_replicate=2, dp_shard=1))
    mesh = world.fsdp_mesh
    place = [Replicate()] * mesh.ndim
    parameters = [nn.Parameter(distribute_tensor(torch.zeros(size), mesh, place, src_data_rank=None)) for size in SIZES]
    sums, all_reduce, sizes, early = buckets.ReplicaSums(world.group("dp_replicate")), dist.all_reduce, [], []

    def counted(tensor, **options):
        sizes.append(tensor.numel())
        return all_reduce(tensor, **options)

    order = [index for index in reversed(range(len(SIZES))) if index != WITHOUT]
    with mock.patch.object(buckets, "BUCKET", 12), mock.patch.object(dist, "all_reduce", counted):
        for _ in range(2):
            sums.begin(parameters)
            for index in order if world.rank == 0 else order[::-1]:
                gradient = torch.full((SIZES[index],), index + 10.0**world.rank)
                parameters[index].grad = dtensor_like(gradient, parameters[index])
                sums.add(parameters[index])
            early.append(len(sizes))
            sums.finish()
    return [p.grad is not None and local(p.grad).tolist() for p in parameters], sizes, early

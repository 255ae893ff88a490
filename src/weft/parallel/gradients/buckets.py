"""Sums gradients over replicas in buckets, while backward computes the next gradients (Li et al., 2020)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft.parallel.local_parameters import local
from weft.torch_private import dtensor_like

BUCKET = 2**23  # elements; 32 MiB in float32


@dataclass
class _Bucket:
    """Parameters whose gradients are summed together.

    Attributes:
        missing: parameters whose gradient is not complete.
        work: the all-reduce, once it has started.
    """

    parameters: list[Any] = field(default_factory=list)  # DTensors
    missing: set[Any] = field(default_factory=set)
    work: dist.Work | None = None

    def start(self, group: dist.ProcessGroup) -> None:
        """Starts the all-reduce. Gradients become slices of one buffer; one gradient needs no buffer."""
        found = [(p, local(p.grad)) for p in self.parameters if p.grad is not None]
        if not found:
            return
        if len(found) == 1:
            buffer = found[0][1].contiguous()
            found[0][0].grad = dtensor_like(buffer, found[0][0])
        else:
            buffer = torch.cat([gradient.flatten() for _, gradient in found])
            slices = buffer.split([gradient.numel() for _, gradient in found])
            for (parameter, gradient), part in zip(found, slices, strict=True):
                parameter.grad = dtensor_like(part.view(gradient.shape), parameter)
        self.work = dist.all_reduce(buffer, group=group, async_op=True)


class ReplicaSums:
    """Sums the gradients of a step over the replicas of a model, each of which is on one rank.

    Buckets have the parameters in reverse order, because backward computes the gradients of the last layers first.
    They are summed in this order on all ranks. A parameter without a gradient must have none on any rank.

    Args:
        group: process group of the replicas.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.buckets: list[_Bucket] = []
        self.of: dict[Any, _Bucket] = {}
        self.started = 0

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Must be called before the last backward pass of a step. This pass starts the sums."""
        self.buckets, self.started, size = [], 0, BUCKET
        for parameter in reversed([p for p in parameters if p.requires_grad]):
            if size + parameter.numel() > BUCKET:
                self.buckets.append(_Bucket())
                size = 0
            self.buckets[-1].parameters.append(parameter)
            size += parameter.numel()
        for bucket in self.buckets:
            bucket.missing.update(bucket.parameters)
        self.of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}

    def add(self, parameter: DTensor) -> None:
        """Notes that a parameter's gradient is complete. Starts the sums of complete buckets, in order."""
        if (bucket := self.of.get(parameter)) is None:  # not the last backward pass of the step
            return
        bucket.missing.discard(parameter)
        while self.started < len(self.buckets) and not self.buckets[self.started].missing:
            self.buckets[self.started].start(self.group)
            self.started += 1

    def finish(self) -> None:
        """Must be called after the last backward pass of a step. Waits for all sums."""
        for bucket in self.buckets[self.started :]:
            bucket.start(self.group)
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
        self.buckets, self.of = [], {}
